"""The copy of Echo that runs, where an installer made it: what it noted of its source, and what has replaced it.

<home>/versions/<name>/          an installation, with a copy of `installers`
<home>/versions/<name>/source.json   what the installer was given
<home>/current                   leads to the one that holds
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from echo_node.core.updating import Note, Origin
from echo_shared.installation import NAME

_NOTE: Final = "source.json"
_VERSIONS: Final = "versions"
_MANIFEST: Final = "manifest.json"
"""Of a wheelhouse that is a directory: by it everything else there is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What an installer was given, to be given again."""

    origin: Origin
    source: str
    options: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that say where it installs."""


class InstalledCopy:
    """The environment of this process as it was when it started: later, `current` may lead elsewhere."""

    def __init__(self, prefix: Path | None = None) -> None:
        """`prefix`: this interpreter's, unless given."""
        self.environment = (prefix or Path(sys.prefix)).resolve()

    @property
    def home(self) -> Path:
        """Where the installer puts all that it makes."""
        return self.environment.parent.parent

    @property
    def is_by_installer(self) -> bool:
        return (
            self.environment.parent.name == _VERSIONS
            and (self.environment / "installers").is_dir()
            and self._current.is_dir()
        )

    @property
    def is_replaced(self) -> bool:
        """Whether another version holds now."""
        return self.is_by_installer and self.newest != self.environment

    @property
    def newest(self) -> Path:
        """The environment that holds."""
        return self._current.resolve()

    @property
    def newest_release(self) -> str:
        """Of the environment that holds; empty = nothing says so."""
        places = [str(path) for path in self.newest.glob("lib/python*/site-packages")]
        return next((one.version for one in metadata.distributions(name=NAME, path=places)), "")

    @property
    def _current(self) -> Path:
        return self.home / "current"

    @property
    def installer(self) -> Path:
        """The script that this copy came with."""
        system = "macos" if sys.platform == "darwin" else "linux"
        return self.environment / "installers" / system / "install.sh"

    def given(self) -> Given | None:
        """None where nothing is noted that can be understood."""
        try:
            fields: Mapping[str, Any] = json.loads((self.environment / _NOTE).read_text(encoding="utf-8"))
            return Given(
                origin=Origin(fields["origin"]),
                source=str(fields["source"]),
                options=tuple(str(option) for option in fields["options"]),
                environment={str(name): str(value) for name, value in dict(fields["environment"]).items()},
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note(self) -> Note | None:
        """What is noted, and how things stand there now."""
        given = self.given()
        if given is None:
            return None
        if given.origin is not Origin.WHEELHOUSE or "://" in given.source:
            return Note(origin=given.origin, source=given.source)
        path = Path(given.source)
        is_there = path.is_file() or (path / _MANIFEST).is_file()
        return Note(origin=given.origin, source=given.source, is_there=is_there, is_owners=is_there and is_owners(path))


def is_owners(path: Path) -> bool:
    """Whether this user and the system alone can put something else at `path`, or change what it holds.

    The user's own group counts as the user, as it does for the usual umask of 002. Raises no error: what cannot be
    looked at is somebody else's.
    """
    try:
        real = path.resolve()
        below = [real / _MANIFEST] if real.is_dir() else []
        return (
            all(_keeps_others_out(one.lstat()) for one in (path, *path.parents) if one.is_symlink())
            and all(_keeps_others_out(one.stat()) for one in [real, *below])
            and all(_keeps_others_out(one.stat(), is_above=True) for one in real.parents)
        )
    except OSError:
        return False


def _keeps_others_out(found: os.stat_result, *, is_above: bool = False) -> bool:
    if sys.platform == "win32":
        return False  # Its rights are not in a mode.
    if is_above and found.st_mode & stat.S_ISVTX:
        return True  # As in /tmp: nobody removes or renames there what is another's.
    is_link = stat.S_ISLNK(found.st_mode)  # Whose mode means nothing.
    by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getgid())
    return found.st_uid in (0, os.getuid()) and (is_link or not (found.st_mode & stat.S_IWOTH or by_group))
