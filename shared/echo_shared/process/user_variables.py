"""Environment variables for the user's name and home, if unset, as in containers and under service managers.

PyTorch's compiler calls `getpass.getuser` to name a directory. If USER is unset, `getuser` reads /etc/passwd. It raises
KeyError if that file lacks the user or is unreadable, as in a cage. Every child process gets these variables.
"""

from __future__ import annotations

import getpass
import os
from typing import Final

_NAMES: Final = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables that `getpass.getuser` reads."""


def user_variables() -> dict[str, str]:
    """Return the variables to add. HOME is left out if the system knows no home."""
    added: dict[str, str] = {}
    if not any(os.environ.get(name) for name in _NAMES):
        added["USER"] = _name()
    if os.name == "posix" and not os.environ.get("HOME") and (home := os.path.expanduser("~")) != "~":  # noqa: PTH111
        added["HOME"] = home
    return added


def _name() -> str:
    try:
        return getpass.getuser()
    # The type of `getuser`'s error depends on Python's version and on the system.
    except (KeyError, OSError, ImportError):
        return f"user-{os.getuid()}" if os.name == "posix" else "user"
