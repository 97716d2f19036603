"""Priority of this process, and its end together with its parent. Threads that start later inherit the priority."""

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
"""Seconds between attempts to change a session's niceness: Linux allows users other than root one such change per 0.1
s.
"""


def give_way(priority: Priority) -> None:
    """Lower this process's priority for processor and disk. A refusal by the system is only logged."""
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
        log.warning("The system refuses the engine's priority %r: %s", priority, error)


def die_with_parent() -> None:
    """End this process together with its parent, on Linux. A suspended process would not notice that its input has
    ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _on_linux(priority: Literal["lowest", "low"]) -> None:
    """Set SCHED_IDLE, which uses only idle cores. Also set a niceness, because Linux counts niced computing time
    separately.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _NICE[priority])
    if priority == "lowest":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    else:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    _lower_session(_NICE[priority])  # This comes last, because a container may refuse it.


def _lower_session(niceness: int) -> None:
    """Set the niceness of the session. With autogroups, the kernel first shares the cores equally among sessions,
    whatever the priorities of their processes: sched(7), "The autogroup feature". If other programs have processes in
    the session, nothing changes.
    """
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            if _AUTOGROUP.exists():
                _AUTOGROUP.write_text(str(niceness))
            return
        time.sleep(_AGAIN_S)


def _on_macos(priority: Literal["lowest", "low"]) -> None:
    """Use the QoS class "utility": "background" would keep the process off the fast cores even when they are idle."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE[priority])
    if priority == "lowest":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_UTILITY, 0)


def _on_windows(priority: Literal["lowest", "low"]) -> None:
    """Lower the priorities for processor and disk. At "lowest", also let Windows run the process at low speed (EcoQoS).

    https://learn.microsoft.com/windows/win32/api/processthreadsapi/nf-processthreadsapi-setprocessinformation
    """
    process, constants = psutil.Process(), psutil
    lowest = priority == "lowest"
    process.nice(getattr(constants, "IDLE_PRIORITY_CLASS" if lowest else "BELOW_NORMAL_PRIORITY_CLASS"))
    process.ionice(getattr(constants, "IOPRIO_VERYLOW" if lowest else "IOPRIO_LOW"))
    if lowest:
        # Structure version 1, with execution-speed throttling (EcoQoS) controlled and on.
        throttling = (ctypes.c_uint32 * 3)(1, 1, 1)
        kernel: Any = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
        kernel.SetProcessInformation(
            kernel.GetCurrentProcess(), _PROCESS_POWER_THROTTLING, ctypes.byref(throttling), ctypes.sizeof(throttling)
        )
