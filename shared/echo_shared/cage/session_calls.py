"""The filter of system calls for processes of environments.

It forbids more calls than the filter of engines (`seccomp`), but lets a process that holds sessions start other
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from echo_shared.cage import seccomp, syscalls
from echo_shared.cage.seccomp import Check, Except, Only
from echo_shared.cage.session_terms import Children
from echo_shared.cage.supervised_files import FILE_CALLS

_MORE: Final[Mapping[str, tuple[int, int]]] = {
    # These calls create memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # This call types input into a terminal.
    "ioctl": (16, 29),
}
"""Numbers of calls that only this filter limits, in the order of `syscalls.PROCESSORS`."""
_TYPE_INTO_TERMINAL, _TERMINAL_FUNCTIONS = 0x5412, 0x541C
_NAMESPACES: Final = 0x7E020080
_ADOPT_ORPHANS: Final = 36
"""Option PR_SET_CHILD_SUBREAPER of prctl."""
_SIBLING: Final = 0x8000
"""Flag CLONE_PARENT: the new process gets the caller's parent, and so would leave the caller's session."""
FORBIDDEN_FLAGS: Final = _NAMESPACES | _SIBLING
"""Flags of clone that no process of an environment may use."""
_SELF: Final = (0,)
_ANY: Final[Check] = ()
SCHEDULING: Final = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Calls that change scheduling. Their first argument is a thread id; 0 = the calling thread."""
SUPERVISED: Final = ("clone", "fork", "vfork", "connect", "bind", "listen", *FILE_CALLS, *SCHEDULING)
"""Calls about which the warden (the process outside the cage) decides, if the caged process may start programs."""


def numbers(processor: str) -> dict[str, int]:
    place = syscalls.PROCESSORS.index(processor)
    return syscalls.numbers(processor) | {name: known[place] for name, known in _MORE.items()}


def conditions(
    pid: int, *, children: Children, connects: bool = False, listens: bool = False, scoped: bool = True
) -> dict[str, tuple[Check, ...]]:
    """Return the calls that process `pid` may make only with certain arguments, as `seccomp.conditions` does.

    `scoped`: Landlock limits signals to the processes of the cage.
    """
    partly = dict(seccomp.conditions(pid, tcp=connects or listens or children == "programs"))
    partly["ioctl"] = ((Except(1, _TYPE_INTO_TERMINAL), Except(1, _TERMINAL_FUNCTIONS)),)
    if listens:
        partly |= {"bind": (_ANY,), "listen": (_ANY,)}
    if children == "none":
        return partly
    of_any_process = {name: (Only(0, _SELF),) for name in ("prlimit64", "move_pages", *SCHEDULING)}
    partly |= {name: (check,) for name, check in of_any_process.items()}
    partly["prctl"] = (_ANY,)
    if scoped:
        partly |= {"kill": (_ANY,), "tgkill": (_ANY,)}
    if children == "forks":
        partly |= {"clone": ((Only(0, _SELF, FORBIDDEN_FLAGS),),), "fork": (_ANY,), "vfork": (_ANY,)}
        return partly
    # Orphans must become children of the warden, which knows their session.
    partly["prctl"] = ((Except(0, _ADOPT_ORPHANS),),)
    thread = partly["clone"]
    for name in set(SUPERVISED) - set(SCHEDULING):
        partly.pop(name, None)
    partly |= {"clone": thread, "execve": (_ANY,), "accept": (_ANY,), "accept4": (_ANY,)}
    partly["socket"] = (*partly["socket"], (Only(0, (1,)), Only(1, (1,), 0xF)))
    return partly


def program(processor: str, pid: int, *, children: Children, connects: bool, listens: bool, scoped: bool) -> bytes:
    """Return the filter as BPF code."""
    partly = conditions(pid, children=children, connects=connects, listens=listens, scoped=scoped)
    asked = SUPERVISED if children == "programs" else ()
    return seccomp.built(processor, numbers(processor), partly, asked)
