"""Transfer of artefacts through memory to nodes on the hub's host, without network and torrent. Linux only.

The hub copies an artefact into an unnamed memory file (`MemorySegment`), and offers its address to nodes that connect
from the same host. The kernel frees the memory once the hub has closed the file or died, and the last reader has
finished. Only the hub's user can open it.

multiprocessing.shared_memory uses names instead: a killed hub would leave its segments behind, and before Python 3.13
the first reader to exit would remove them for all others (https://github.com/python/cpython/issues/82300).
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Final

from echo_shared.artefacts.manifest import Manifest
from echo_shared.wire.messages import SharedMemory

AVAILABLE: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
"""True if this system supports `MemorySegment`. Requires Linux and a Python built for a recent kernel."""


class MemorySegment:
    """One artefact in memory: its files, concatenated in the manifest's order.

    After `close`, no further reader can open it; readers that have opened it can still read everything.
    """

    def __init__(self, descriptor: int, address: SharedMemory) -> None:
        self._descriptor = descriptor
        self.address = address

    @classmethod
    def of(cls, manifest: Manifest, directory: Path) -> MemorySegment:
        """Copy the artefact in `directory` to memory. Blocks the calling thread. Raises OSError if memory is full."""
        assert sys.platform == "linux", "the caller must check AVAILABLE"
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
    """Copy the artefact at `address` into `directory`. Blocks the calling thread. The caller must verify the files.

    Raises OSError if the hub has closed the memory, or if this process cannot see the hub's process: on another host,
    as another user, or in a container.
    """
    if sys.platform != "linux":
        raise OSError("Only Linux supports reading another process's memory files.")
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
    """Open the memory file. Its random name is checked before and after, because the hub may reuse the descriptor's
    number.
    """
    assert sys.platform == "linux", "the caller has checked the platform"
    link = Path("/proc", str(address.pid), "fd", str(address.descriptor))
    _check_name(link, address)
    # O_NONBLOCK: the link may lead to a pipe or terminal, on which opening would block.
    descriptor = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_name(Path("/proc/self/fd", str(descriptor)), address)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_name(link: Path, address: SharedMemory) -> None:
    if str(link.readlink()) != f"/memfd:{address.name} (deleted)":
        raise FileNotFoundError(f"{link} is not the memory file {address.name}.")


def _copy(source: int, target: int, size_bytes: int) -> None:
    """Copy within the kernel, without a buffer in this process."""
    assert sys.platform == "linux", "the callers have checked the platform"
    while size_bytes:
        sent = os.sendfile(target, source, None, size_bytes)
        if sent == 0:
            raise OSError("The memory file ends too early.")
        size_bytes -= sent
