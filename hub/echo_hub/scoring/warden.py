"""Runs one scoring process and leaves nothing of it behind: `python -m echo_hub.scoring.warden HUB_PID`, on Linux.

What a scorer starts in a session of its own is in no group that could be ended as a whole, and when the process that
has started it dies, it would become init's. So the warden stands between the hub and the scoring process as a
*subreaper* (prctl(2)): whatever loses its parent below it becomes its child. It ends all of that when the scoring
process has ended, when the hub asks for it by SIGTERM, and when the hub has died, however it died. Then it ends as the
scoring process did. It runs nothing of a task, and the scoring process ends when the warden is killed.
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
    """From here on this process gets signal `number` when process `parent`, which has started it, ends (or only the
    thread that did so); at once if it has ended already. Raises OSError where the system refuses."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _watch(worker: int) -> int | None:
    """The exit status of the scoring process, once it has ended; None if this process is to end before. Both signals
    are blocked, so none is missed."""
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) != signal.SIGTERM:
        pid = -1
        while pid != 0:  # One signal may stand for the ends of several.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                return os.waitstatus_to_exitcode(status)
    return None


def _end_all() -> None:
    """Ends all that is below this process. What is started meanwhile becomes its child in the end."""
    with contextlib.suppress(ChildProcessError):  # None is left.
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # Denied: another user's, by sudo.
                    process.kill()
            os.waitpid(-1, 0)


def _end_by(number: int) -> None:
    """Ends this process by a signal, without a core dump: that is the scoring process's."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def main(hub: int) -> int:
    """The exit status; what the scoring process died of kills this one too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    end_with(hub, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command = [sys.executable, "-m", "echo_hub.scoring.worker", str(os.getpid())]
    worker = os.posix_spawn(sys.executable, command, os.environ, setsigmask=())
    os.closerange(0, 2)  # The hub is to see at once that nobody holds the other end of its pipes any more.
    exit_code = _watch(worker)
    _end_all()
    if exit_code is not None and exit_code < 0:
        _end_by(-exit_code)
    return exit_code or 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
