"""How many files and sockets the system lets this process have open."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

RESERVED: Final = 256
"""For files, the store, child processes and the hub's BitTorrent peer."""


def room_for(connections: int) -> int:
    """How many connections there may be, once the process's own limit is raised for so many as far as it may be."""
    if sys.platform == "win32":
        return connections  # Sockets are no descriptors there.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # Some systems have a further limit of their own.
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    return max(soft - RESERVED, soft // 2)
