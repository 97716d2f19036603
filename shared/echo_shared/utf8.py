"""UTF-8 for names of files and for what a command prints, whatever the system's locale says."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from echo_shared.errors import ConfigError

_MODE: Final = "utf8"


def use_utf8() -> None:
    """Begin a command: call this before it reads a name or prints a text.

    In a locale of another encoding (`LC_ALL=C`) the command starts once more in Python's UTF-8 mode, and so do its
    child processes. Otherwise a name such as `/home/zoë` would be other characters here than in libtorrent, in a
    database and at the other end of a pipe. What standard output and error cannot show is escaped.
    """
    if sys.getfilesystemencoding() != "utf-8" and _MODE not in sys._xoptions and sys.executable:
        # libtorrent goes by the C library's locale.
        environment = {**os.environ, "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
        os.execve(sys.executable, [sys.executable, "-X", _MODE, *sys.orig_argv[1:]], environment)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def utf8_names() -> Iterator[None]:
    """Raise ConfigError for a name within that is not UTF-8: such a name can go to no database and to no other end."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise ConfigError(
            "A name of a file, or a text, is not UTF-8.",
            got=ascii(error.object)[:200],
            do="Use directories, files and settings whose names and texts are UTF-8.",
        ) from error
