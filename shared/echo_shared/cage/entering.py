"""Puts this process into a cage (sandbox) for the rest of its life, with the system's own mechanism."""

from __future__ import annotations

import sys

from echo_shared.cage import linux, macos, windows
from echo_shared.cage.description import Cage, Held


def enter(cage: Cage) -> Held:
    """Limit this process, with all its threads, to the rights of `cage`, permanently.

    Never raises: the result says what the system refused. On Linux, call this before any thread starts.
    """
    if sys.platform == "linux":
        return linux.enter(cage)
    if sys.platform == "darwin":
        return macos.enter(cage)
    if sys.platform == "win32":
        return windows.enter(cage)
    return Held.to_nothing(f"Echo has no cage for {sys.platform}")
