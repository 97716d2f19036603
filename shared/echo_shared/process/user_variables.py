"""Environment variables for the user's name and home. They are often unset in containers and under service managers.

PyTorch's compiler names a directory after `getpass.getuser()`. If USER is unset, `getuser` reads /etc/passwd, and
raises KeyError if that file lacks the user or is unreadable, as in the engine's sandbox. Every child process gets these
variables.
"""

from __future__ import annotations

import getpass
import os
from typing import Final

_NAMES: Final = ("LOGNAME", "USER", "LNAME", "USERNAME")


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
    # The error's type depends on the version of Python and on the system.
    except (KeyError, OSError, ImportError):
        return f"user-{os.getuid()}" if os.name == "posix" else "user"
