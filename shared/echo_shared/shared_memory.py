"""Artefacts in the memory of the hub's host, for nodes on that host: no network and no torrent in between. Linux only.

The hub copies an artefact into memory that it holds open (`Segment`), and offers its address to nodes that connect
from the same host. The memory has no place in any file system, so nothing is ever left behind: the kernel frees it when
the hub has closed it or has ended, killed or not, and the last reader is done. It opens it to the hub's user alone.

Of multiprocessing.shared_memory, which has names, a killed hub would leave its segments behind, and before Python 3.13
the first reader to exit would remove them under everybody's feet (https://github.com/python/cpython/issues/82300).
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Final

from echo_shared.artefacts import Manifest
from echo_shared.messages import SharedMemory

AVAILABLE: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether a `Segment` can be made here: not on macOS and Windows, nor by a Python that was built for an old Linux."""


class Segment:
    """One artefact in memory, its files one after the other in the manifest's order.

    After `close` nobody begins to read it; whoever has begun reads to its end.
    """

    def __init__(self, descriptor: int, address: SharedMemory) -> None:
        self._descriptor = descriptor
        self.address = address

    @classmethod
    def of(cls, manifest: Manifest, directory: Path) -> Segment:
        """A copy of the artefact in `directory`. Blocks. Raises OSError when there is no memory for it."""
        assert sys.platform == "linux", "the caller has looked at AVAILABLE"
        name = f"echo-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(name)
        try:
            for file in manifest.files:
                with (directory / file.path).open("rb") as source:
                    _copy(source.fileno(), descriptor, file.size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, SharedMemory(pid=os.getpid(), descriptor=descriptor, name=name))

    def close(self) -> None:
        os.close(self._descriptor)


def read(address: SharedMemory, manifest: Manifest, directory: Path) -> None:
    """Copies the artefact at `address` into `directory`; the caller verifies it. Blocks.

    Raises OSError when it is not there: because the hub has closed it, or because this process cannot see the hub's,
    as on another host, as another user, or in a container. The random name tells it from all else that the same numbers
    may stand for here: nothing else is opened.
    """
    if sys.platform != "linux":
        raise OSError("Only Linux shows a process's memory to another.")
    memory = _open(address)
    try:
        for file in manifest.files:
            path = directory / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:
                _copy(memory, target.fileno(), file.size_bytes)
    finally:
        os.close(memory)


def _open(address: SharedMemory) -> int:
    """A descriptor of it. Its name is looked at before and after, for between the two it may become another's."""
    assert sys.platform == "linux", "the caller has made sure"
    link = Path("/proc", str(address.pid), "fd", str(address.descriptor))
    _check_name(link, address)
    descriptor = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # Nothing that it may be holds us up.
    try:
        _check_name(Path("/proc/self/fd", str(descriptor)), address)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_name(link: Path, address: SharedMemory) -> None:
    if str(link.readlink()) != f"/memfd:{address.name} (deleted)":
        raise FileNotFoundError(f"{link} is not {address.name}.")


def _copy(source: int, target: int, size_bytes: int) -> None:
    """Inside the kernel."""
    assert sys.platform == "linux", "the callers have made sure"
    while size_bytes:
        sent = os.sendfile(target, source, None, size_bytes)
        if sent == 0:
            raise OSError("It ends too early.")
        size_bytes -= sent
