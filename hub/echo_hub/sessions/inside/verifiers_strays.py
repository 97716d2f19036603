"""Find and end programs that an episode of verifiers has left behind. Linux only; elsewhere nothing is found.

This process adopts the orphans among its descendants (`adopt_orphans`), so that an agent's program which has detached
itself stays below this process. A program is told by its environment variables, its arguments, or its working
directory, which name the worker's home directory or the episode's trace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
_PROC: Final = Path("/proc")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, int]:
    """Return the ids of all processes below this one, with their parents' ids."""
    parents = {}
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name in parentheses may hold anything, so the fields are counted from its end.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    below: dict[int, int] = {}
    layer = {os.getpid()}
    while layer:
        found = {pid: parent for pid, parent in parents.items() if parent in layer}
        below |= found
        layer = set(found)
    return below


def end_programs(marks: Iterable[str], *, but: Collection[int] = (), orphans_only: bool = False) -> list[int]:
    """Kill every descendant of this process whose variables, arguments or directory contain one of `marks`, except
    those in `but`. Return the ids of the killed.

    With `orphans_only`, kill only those whose parent has ended, with their descendants.
    """
    wanted = [mark.encode() for mark in marks]
    ended = []
    for pid, parent in descendants().items():
        if pid in but or (orphans_only and parent != os.getpid()):
            continue
        if any(mark in text for text in _texts(pid) for mark in wanted):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    reap_orphans(but)
    return ended


def reap_orphans(but: Collection[int]) -> None:
    """Collect the exit status of adopted processes that have ended. `but` are children for which other code waits."""
    for pid, parent in descendants().items():
        if parent == os.getpid() and pid not in but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _texts(pid: int) -> list[bytes]:
    """Return the process's environment variables, arguments and working directory, which show to which episode it
    belongs."""
    found = []
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError):
            found.append((_PROC / str(pid) / name).read_bytes())
    with contextlib.suppress(OSError):
        found.append(os.fsencode((_PROC / str(pid) / "cwd").readlink()))
    return found
