"""Short memory: a control group of Linux for the hub and all of its child processes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
FREE: Final = 0.85
"""Memory limit of a squeezed group, as a share of the memory that it uses."""
ROOM_BYTES: Final = 2**20
MOST_ROOM_BYTES: Final = 2**29


class MemoryGroup:
    """A control group. Prefixed to another command, `command` runs that command inside the group."""

    def __init__(self, place: Path) -> None:
        self._place = place
        is_v1 = (place / "memory.limit_in_bytes").exists()
        self._limit = place / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        self._usage = place / ("memory.usage_in_bytes" if is_v1 else "memory.current")
        self._unlimited = "-1" if is_v1 else "max"

    @property
    def command(self) -> Sequence[str]:
        enter = f"import os, sys; open({str(self._place / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        return (sys.executable, "-c", f"{enter}; os.execvp(sys.argv[1], sys.argv[1:])")

    def squeeze(self) -> None:
        """Set the limit below the current use, or slightly above it if the kernel cannot reclaim enough. The kernel
        then ends a process that asks for more. Raises OSError."""
        share, room = FREE, 0
        while True:
            used = int(self._usage.read_text())
            try:
                self._limit.write_text(str(int(used * share) + room))
                return
            except OSError as error:
                if error.errno != errno.EBUSY or room >= MOST_ROOM_BYTES:
                    raise
            share, room = 1.0, 2 * room or ROOM_BYTES  # The memory use may have grown since it was read.

    def release(self) -> None:
        self._limit.write_text(self._unlimited)


def lacking() -> str:
    """Why this machine cannot have a control group; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux makes control groups"
    try:
        with memory_group():
            return ""
    except OSError as error:
        return f"no control group can be made: {error}"


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group while the block runs. Its processes must end before the block does. Raises OSError."""
    base = ROOT / "memory" if (ROOT / "memory").is_dir() else ROOT
    place = base / f"echo-chaos-{os.getpid()}"
    place.mkdir()
    try:
        if not any((place / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            raise OSError(f"{base} controls no memory")
        yield MemoryGroup(place)
    finally:
        place.rmdir()
