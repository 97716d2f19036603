"""Which directories this Python and its libraries are read from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")


def directories() -> tuple[Path, ...]:
    """Those of the interpreter, of all that can be imported, and of the libraries that it has loaded.

    Not the working directory, which `python -m` can import from, nor one that holds the user's home.
    """
    found = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *_importable(), *_libraries()]
    return narrow(Path(name) for name in dict.fromkeys(found) if name)


def narrow(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Without those that hold the user's home, or do not exist."""
    home = _home()
    kept_out = () if home is None else (home, *home.parents)
    resolved = dict.fromkeys(path.resolve() for path in paths)
    return tuple(path for path in resolved if path.exists() and path not in kept_out)


def _home() -> Path | None:
    """None in a container whose user has none."""
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None


def _importable() -> Iterator[str]:
    """`python -m` puts the working directory first."""
    first, *rest = [name for name in sys.path if name] or [""]
    if not first or Path(first).resolve() != Path.cwd():
        yield first
    yield from rest
    for name in ("echo_node", "echo_shared"):  # Installed as a link to a checkout, they are on no path.
        module = sys.modules.get(name)
        yield from () if module is None else map(str, module.__path__)


def _libraries() -> Iterator[str]:
    yield from os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    try:
        maps = os.fsdecode(_MAPS.read_bytes())
    except OSError:
        return  # Only Linux has this file.
    for line in maps.splitlines():
        _, slash, path = line.partition(" /")
        if slash and ".so" in path:
            yield f"/{path.rpartition('/')[0]}"
