"""Puts this process into a cage for the rest of its life, by whatever its system has for that."""

from __future__ import annotations

import sys

from echo_node.host.cage import linux, macos, windows
from echo_node.host.cage.description import Cage, Held


def enter(cage: Cage) -> Held:
    """From here on this process, with all its threads, does no more than `cage` says; there is no way back.

    Never raises: what the system refuses is in what it returns. On Linux it is to be called before there are threads.
    """
    if sys.platform == "linux":
        return linux.enter(cage)
    if sys.platform == "darwin":
        return macos.enter(cage)
    if sys.platform == "win32":
        return windows.enter(cage)
    return Held.to_nothing(f"Echo knows no cage on {sys.platform}")
