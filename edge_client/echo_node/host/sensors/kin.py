"""Recognises this user's processes that belong to Echo: this node, other nodes, and a hub with its learner.

Example: a hub's learner trains on this machine's GPU, and a node samples on the same GPU. The learner's load does not
mean that the owner needs the GPU, so the node must keep working.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Final

import psutil

LOOK_S: Final = 10.0
"""Seconds for which a scan of all processes is reused."""
HUB: Final = "echo_hub"
_PACKAGES: Final = {"echo-hub": HUB, "echo-node": "echo_node"}
"""Package of each program's code."""
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel: the inode of the first process namespace, which exists from the machine's start."""


class Kin:
    """Recognises Echo's processes. A result is cached as long as its process runs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, str]] = {}
        """(start time, result of `package_of`), by process id."""
        self._pids: frozenset[int] = frozenset()
        self._looked_at = -LOOK_S

    def package_of(self, pid: int) -> str:
        """Return Echo's package that the process runs, `HUB` or echo_node. "" = another program, another user's
        process, or unknown.
        """
        try:
            process = psutil.Process(pid)
            started_at = process.create_time()
            known = self._known.get(pid)
            if known is None or known[0] != started_at:
                is_ours = process.username() == _user()
                known = (started_at, package_of(process.cmdline()) if is_ours else "")
                self._known[pid] = known
            return known[1]
        except psutil.Error:
            self._known.pop(pid, None)
            return ""

    def pids(self) -> frozenset[int]:
        """Return the ids of Echo's processes, from a scan that is at most LOOK_S seconds old."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            everybody = frozenset(psutil.pids())
            self._known = {pid: known for pid, known in self._known.items() if pid in everybody}
            self._pids = frozenset(pid for pid in everybody if self.package_of(pid))
            self._looked_at = time.monotonic()
        return self._pids


def package_of(command: Sequence[str]) -> str:
    """Return Echo's package for the command lines `python -m echo_hub...`, `python -m echo_node...`, and the programs
    echo-hub and echo-node; "" for others.
    """
    modules = [name.partition(".")[0] for option, name in pairwise(command) if option == "-m"]
    programs = [_PACKAGES.get(PurePath(word).name.removesuffix(".exe"), "") for word in command[:2]]
    return next((name for name in (*modules, *programs) if name in _PACKAGES.values()), "")


def _user() -> str:
    return psutil.Process().username()


def sees_the_machines_pids() -> bool:
    """Return False in a container: there, a GPU's driver reports the machine's process ids, not the container's."""
    if sys.platform != "linux":
        return True
    try:
        return _NAMESPACE.stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False
