"""What a process takes of the machine's memory for itself."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_OOM_SCORE_ADJ: Final = 800
"""Of 1000: the kernel's killer then takes the worker before anything of its user's."""
_KERNEL_COUNTS: Final = Path("/proc/vmstat")


def own_bytes(pid: int) -> int:
    """Memory that this process alone holds; not model files mapped into it, which the system may let go of.

    On macOS, model files count too. 0 when it has ended, or the system does not say.
    """
    try:
        process = psutil.Process(pid)
        used = process.memory_info()
        if sys.platform == "linux":
            return int(used.rss - used.shared)
        if sys.platform == "win32":
            return int(used.private)
        return int(used.rss)  # To tell mapped files apart takes root there.
    except (psutil.Error, OSError):
        return 0


def left_bytes() -> int:
    """Memory that the machine has left for whoever asks for it."""
    return int(psutil.virtual_memory().available)


def kernel_kills() -> int | None:
    """Processes that the kernel has killed for their memory since it started; None where it does not say."""
    try:
        counts = dict(line.split() for line in _KERNEL_COUNTS.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def go_first() -> None:
    """Has the kernel end this process before what its user works with, should the machine run out of memory."""
    if sys.platform == "linux":
        with suppress(OSError):  # A sandbox may forbid it.
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ), encoding="ascii")
