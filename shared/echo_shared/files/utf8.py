"""UTF-8 for file names and for a command's output, regardless of the system's locale."""

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
    """Set up UTF-8. Call this first in a command, before it reads a file name or prints.

    In a locale with another encoding (`LC_ALL=C`), restart the command in Python's UTF-8 mode, which child processes
    inherit. Otherwise Python, libtorrent and databases would read names such as `/home/zoë` differently. Output escapes
    characters that the terminal's encoding lacks.
    """
    if sys.getfilesystemencoding() != "utf-8" and _MODE not in sys._xoptions and sys.executable:
        # libtorrent uses the C library's locale, so LC_ALL is set as well.
        environment = {**os.environ, "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
        os.execve(sys.executable, [sys.executable, "-X", _MODE, *sys.orig_argv[1:]], environment)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def utf8_names() -> Iterator[None]:
    """Convert a UnicodeEncodeError of the block to ConfigError: databases and peers cannot store names that are not
    UTF-8.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise ConfigError(
            "A file name or a text is not UTF-8.",
            got=ascii(error.object)[:200],
            do="Use directories, files and settings whose names and texts are UTF-8.",
        ) from error
