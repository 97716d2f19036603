"""How this process stands among the programs of the machine, and to its parent. Its later threads stand as it does."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal

import psutil

log = logging.getLogger(__name__)

Priority = Literal["lowest", "low", "normal"]

_NICE: Final = {"low": 10, "lowest": 19}
_QOS_CLASS_UTILITY: Final = 0x11
_PROCESS_POWER_THROTTLING: Final = 4
_PR_SET_PDEATHSIG: Final = 1
_AUTOGROUP: Final = Path("/proc/self/autogroup")
_TRIES: Final = 20
_AGAIN_S: Final = 0.1
"""The kernel takes one such change in a tenth of a second, of whoever is not root."""


def give_way(priority: Priority) -> None:
    """Lowers this process's claim on processor and disk. What the system refuses is logged and does without."""
    if priority == "normal":
        return
    try:
        if sys.platform == "win32":
            _on_windows(priority)
        elif sys.platform == "darwin":
            _on_macos(priority)
        else:
            _on_linux(priority)
    except (OSError, psutil.Error, AttributeError) as error:
        log.warning("The system does not let the engine have the priority %r: %s", priority, error)


def die_with_parent() -> None:
    """On Linux. One that is suspended would outlive a parent that was killed: it does not see its input end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _on_linux(priority: Literal["lowest", "low"]) -> None:
    """SCHED_IDLE runs when nobody else wants the core; Linux counts as `nice` what has a niceness, so it has both."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE[priority])
    if priority == "lowest":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    else:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    _lower_session(_NICE[priority])  # The last: a container may refuse it, and the rest holds all the same.


def _lower_session(niceness: int) -> None:
    """Where the kernel shares cores out among sessions first, each gets as much as any other, whatever the priorities
    within it are, unless the session has a niceness itself: sched(7), "The autogroup feature". One that this process
    shares with others is left as it is."""
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            if _AUTOGROUP.exists():
                _AUTOGROUP.write_text(str(niceness))
            return
        time.sleep(_AGAIN_S)


def _on_macos(priority: Literal["lowest", "low"]) -> None:
    """The class "background" would keep it from the fast cores even where nobody wants them."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE[priority])
    if priority == "lowest":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_UTILITY, 0)


def _on_windows(priority: Literal["lowest", "low"]) -> None:
    """https://learn.microsoft.com/windows/win32/api/processthreadsapi/nf-processthreadsapi-setprocessinformation"""
    process, constants = psutil.Process(), psutil
    lowest = priority == "lowest"
    process.nice(getattr(constants, "IDLE_PRIORITY_CLASS" if lowest else "BELOW_NORMAL_PRIORITY_CLASS"))
    process.ionice(getattr(constants, "IOPRIO_VERYLOW" if lowest else "IOPRIO_LOW"))
    if lowest:
        throttling = (ctypes.c_uint32 * 3)(1, 1, 1)  # Version, what is set, and that it is on: EcoQoS.
        kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
        kernel.SetProcessInformation(
            kernel.GetCurrentProcess(), _PROCESS_POWER_THROTTLING, ctypes.byref(throttling), ctypes.sizeof(throttling)
        )
