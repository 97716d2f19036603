"""Run one scoring process and end everything that it started: `python -m echo_hub.scoring.warden HUB_PID`, on Linux.

If a scorer starts a process in a new session, that process belongs to no group that could be killed, and init adopts it
when its parent dies. So the warden stands between the hub and the scoring process as a *subreaper* (prctl(2)): orphaned
descendants become its children. The warden kills them all when the scoring process ends, when the hub sends SIGTERM,
and when the hub dies. Then it exits with the status of the scoring process. The warden runs no code of the task. If the
warden itself is killed, the scoring process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final

import psutil

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def end_with(parent: int, number: signal.Signals) -> None:
    """Make the kernel send the signal `number` to this process when the parent process `parent` ends, or when the
    thread of the parent that started this process ends.

    If the parent has already ended, the signal comes immediately. Raises OSError if the system refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _watch(worker: int) -> int | None:
    """Wait until the scoring process ends, and return its exit status; return None after SIGTERM.

    The caller must block SIGCHLD and SIGTERM first, so that no signal is missed.
    """
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
        pid = -1
        while pid != 0:  # One SIGCHLD may stand for the end of several children.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                return os.waitstatus_to_exitcode(status)
    return None


def _end_all() -> None:
    """Kill all descendants, including processes that start or are adopted while this function runs."""
    with contextlib.suppress(ChildProcessError):  # No child is left.
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # No permission if sudo runs it.
                    process.kill()
            os.waitpid(-1, 0)


def _end_by(number: int) -> None:
    """End this process by the same signal that ended the scoring process. Write no core dump, because the scoring
    process wrote its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def main(hub: int) -> int:
    """Run the warden and return its exit status. If a signal killed the scoring process, the same signal ends the
    warden."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    end_with(hub, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command = [sys.executable, "-m", "echo_hub.scoring.worker", str(os.getpid())]
    worker = os.posix_spawn(sys.executable, command, os.environ, setsigmask=())
    os.closerange(0, 2)  # The hub then sees its pipes close as soon as the scoring process ends.
    exit_code = _watch(worker)
    _end_all()
    if exit_code is not None and exit_code < 0:
        _end_by(-exit_code)
    return exit_code or 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
