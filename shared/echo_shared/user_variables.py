"""A name and a home for a process's user where the environment has none, as in containers and under service managers.

PyTorch's compiler asks `getpass.getuser` for a directory's name. Without USER that looks into /etc/passwd, which may
lack this user, or be unreadable in a cage, and raises KeyError. Every child process is started with these variables.
"""

from __future__ import annotations

import getpass
import os
from typing import Final

_NAMES: Final = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where `getpass.getuser` looks."""


def user_variables() -> dict[str, str]:
    """What is to be added to the environment; empty where nothing is missing, or HOME cannot be found out."""
    added: dict[str, str] = {}
    if not any(os.environ.get(name) for name in _NAMES):
        added["USER"] = _name()
    if os.name == "posix" and not os.environ.get("HOME") and (home := os.path.expanduser("~")) != "~":  # noqa: PTH111
        added["HOME"] = home
    return added


def _name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # By version of Python and system.
        return f"user-{os.getuid()}" if os.name == "posix" else "user"
