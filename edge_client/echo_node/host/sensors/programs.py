"""Find running programs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath

import psutil


def running(names: Collection[str]) -> frozenset[str]:
    """Return the `names` of running programs, compared without case, directory and ".exe"."""
    if not names:
        return frozenset()
    wanted = {_plain(name): name for name in names}
    return frozenset(
        wanted[plain]
        for process in psutil.process_iter(["name", "exe"])
        for plain in {_plain(process.info["name"] or ""), _plain(process.info["exe"] or "")}
        if plain in wanted
    )


def _plain(name: str) -> str:
    """Return a program's name as users write it. Linux cuts a process's own name to 15 characters."""
    return PurePath(name).name.casefold().removesuffix(".exe")
