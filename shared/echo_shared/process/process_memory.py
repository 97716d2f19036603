"""Measures the memory of processes, and chooses which process the kernel kills first when memory runs out."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_OOM_SCORE_ADJ: Final = 800
"""Linux's oom_score_adj (at most 1000) of a worker: the kernel kills a worker before the user's other processes."""
_KERNEL_COUNTS: Final = Path("/proc/vmstat")


def own_bytes(pid: int) -> int:
    """Return the bytes that only this process holds. Pages of mapped model files do not count, because the system can
    drop them and read them again.

    On macOS, mapped files are included. Returns 0 if the process has ended or the system reports nothing.
    """
    try:
        process = psutil.Process(pid)
        used = process.memory_info()
        if sys.platform == "linux":
            return int(used.rss - used.shared)
        if sys.platform == "win32":
            return int(used.private)
        return int(used.rss)  # Excluding mapped files needs root on macOS.
    except (psutil.Error, OSError):
        return 0


def left_bytes() -> int:
    return int(psutil.virtual_memory().available)


def kernel_kills() -> int | None:
    """Return the number of out-of-memory kills by the kernel since boot; None if the system does not report it."""
    try:
        counts = dict(line.split() for line in _KERNEL_COUNTS.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def go_first() -> None:
    """Make the kernel kill this process before the user's other programs when memory runs out."""
    if sys.platform == "linux":
        with suppress(OSError):  # A container may forbid this write.
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ), encoding="ascii")
