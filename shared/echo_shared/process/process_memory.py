"""Memory used by a process, and memory left on the machine."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_OOM_SCORE_ADJ: Final = 800
"""Linux's oom_score_adj of a worker, of at most 1000: the kernel kills the worker before the user's other processes."""
_KERNEL_COUNTS: Final = Path("/proc/vmstat")


def own_bytes(pid: int) -> int:
    """Return the bytes that only this process holds, without mapped model files, which the system can evict.

    On macOS, mapped files are included. Returns 0 after the process has ended, or if the system reports nothing.
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
    """Return the bytes of memory available on the machine."""
    return int(psutil.virtual_memory().available)


def kernel_kills() -> int | None:
    """Return the number of processes that the kernel killed for memory since boot; None if it is not reported."""
    try:
        counts = dict(line.split() for line in _KERNEL_COUNTS.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def go_first() -> None:
    """Make the kernel kill this process before the user's other programs when memory runs out."""
    if sys.platform == "linux":
        with suppress(OSError):  # A sandbox may forbid it.
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ), encoding="ascii")
