"""Which processes are Echo's own for the same user: those of this node, of other nodes, and of a hub with its learner.

Example: a hub's learner trains on the GPU on which a node beside it samples. Its use is not the owner's, for whom the
node would leave the GPU.
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
"""Between two looks at all processes of the system."""
_PACKAGES: Final = ("echo_hub", "echo_node")
_COMMANDS: Final = ("echo-hub", "echo-node")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel: the inode of the namespace that the machine started with."""


class Kin:
    """Asked once a second; what is known of a process is kept while that process runs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, bool]] = {}
        """When each process was started, and whether it is Echo's."""
        self._pids: frozenset[int] = frozenset()
        self._looked_at = -LOOK_S

    def includes(self, pid: int) -> bool:
        """True if this process is Echo's, and this user's. False for one that cannot be looked at."""
        try:
            process = psutil.Process(pid)
            started_at = process.create_time()
            known = self._known.get(pid)
            if known is None or known[0] != started_at:
                known = (started_at, process.username() == _user() and is_echo(process.cmdline()))
                self._known[pid] = known
            return known[1]
        except psutil.Error:
            self._known.pop(pid, None)
            return False

    def pids(self) -> frozenset[int]:
        """Those that are known, as of some seconds ago."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            everybody = frozenset(psutil.pids())
            self._known = {pid: known for pid, known in self._known.items() if pid in everybody}
            self._pids = frozenset(pid for pid in everybody if self.includes(pid))
            self._looked_at = time.monotonic()
        return self._pids


def is_echo(command: Sequence[str]) -> bool:
    """True for `python -m echo_hub...`, and for the programs echo-hub and echo-node."""
    modules = [name for option, name in pairwise(command) if option == "-m"]
    if any(name.partition(".")[0] in _PACKAGES for name in modules):
        return True
    return any(PurePath(word).name.removesuffix(".exe") in _COMMANDS for word in command[:2])


def _user() -> str:
    return psutil.Process().username()


def sees_the_machines_pids() -> bool:
    """True unless this process is in a container, where a GPU's driver names processes by numbers of the machine."""
    if sys.platform != "linux":
        return True
    try:
        return _NAMESPACE.stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False
