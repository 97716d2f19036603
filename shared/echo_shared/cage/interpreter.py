"""Directories of this Python and its libraries, which a caged process must be able to read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")


def directories() -> tuple[Path, ...]:
    """Return the directories of the interpreter, of all importable packages, and of the loaded libraries.

    The working directory, which `python -m` adds to the path, is left out. So is any directory that contains the user's
    home.
    """
    found = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *_importable(), *_libraries()]
    return narrow(Path(name) for name in dict.fromkeys(found) if name)


def narrow(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the resolved paths. Missing paths, and paths that contain the user's home, are left out."""
    home = _home()
    kept_out = () if home is None else (home, *home.parents)
    resolved = dict.fromkeys(path.resolve() for path in paths)
    return tuple(path for path in resolved if path.exists() and path not in kept_out)


def _home() -> Path | None:
    """Return the home directory; None for a user without one, as in a container."""
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None


def _importable() -> Iterator[str]:
    """Yield the import path without the working directory, which `python -m` puts first."""
    first, *rest = [name for name in sys.path if name] or [""]
    if not first or Path(first).resolve() != Path.cwd():
        yield first
    yield from rest
    # An editable installation of Echo is not on the import path, so add its packages' directories.
    for name in ("echo_node", "echo_shared"):
        module = sys.modules.get(name)
        yield from () if module is None else map(str, module.__path__)


def _libraries() -> Iterator[str]:
    yield from os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    try:
        maps = os.fsdecode(_MAPS.read_bytes())
    except OSError:
        return  # Only Linux has /proc/self/maps, the list of loaded libraries.
    for line in maps.splitlines():
        _, slash, path = line.partition(" /")
        if slash and ".so" in path:
            yield f"/{path.rpartition('/')[0]}"
