"""Raise this process's limit of open files and report how many connections fit into it."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

RESERVED: Final = 256
"""Descriptors kept free for files, the store, child processes and the hub's BitTorrent peer."""


def room_for(connections: int) -> int:
    """Return how many of the wanted `connections` the process may open. First raise the soft limit of open files as far
    as the hard limit allows."""
    if sys.platform == "win32":
        return connections  # Windows sockets use no file descriptors.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # Some systems enforce a further limit of their own.
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    return max(soft - RESERVED, soft // 2)
