"""Descendants of a process, and their use of processor and memory, from /proc on Linux. Needs only the standard
library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    parent: int
    session: int
    """Id of the process's session (setsid)."""
    cpu_s: float
    """Processor time in seconds, including that of ended child processes."""
    threads: int
    memory_bytes: int
    """Resident memory of the process, in bytes."""


def figures(pid: int) -> ProcessFigures | None:
    """Return the session, processor time and memory of a process; None if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    _, ends, rest = text.rpartition(b")")
    if not ends:
        return None
    fields = rest.split()
    return ProcessFigures(
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS,
        threads=int(fields[17]),
        memory_bytes=int(fields[21]) * _PAGE,
    )


def children(pid: int) -> list[int]:
    """Return the child processes of a process, started by any of its threads."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_bytes().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process, parents before children."""
    waiting = children(pid)
    while waiting:
        one = waiting.pop()
        yield one
        waiting += children(one)


def has_children_files() -> bool:
    """Return True if this kernel lists children (CONFIG_PROC_CHILDREN)."""
    return Path("/proc/self/task", str(os.getpid()), "children").exists()
