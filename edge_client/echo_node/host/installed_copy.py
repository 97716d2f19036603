"""The running copy of Echo, if an installer made it: the note about the copy's source, and the version that has
replaced this copy.

<home>/versions/<name>/             an installation, with a copy of `installers`
<home>/versions/<name>/source.json  arguments of the installer
<home>/current                      link to the version in use
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

from echo_node.core.updating import Note, SourceKind
from echo_shared.installation import NAME

_NOTE: Final = "source.json"
_VERSIONS: Final = "versions"
_MANIFEST: Final = "manifest.json"
"""Manifest of a directory of wheels. It verifies all other files of the directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Arguments of the installer that made this copy. With them, the installer can run again."""

    origin: SourceKind
    source: str
    options: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment variables that select the place of the installation."""


class InstalledCopy:
    """The installation from which this process runs. Create this object when the process starts, because the link
    `current` may later lead to another version.
    """

    def __init__(self, prefix: Path | None = None) -> None:
        """`prefix`: directory of the Python environment; None = this interpreter's."""
        self.environment = (prefix or Path(sys.prefix)).resolve()

    @property
    def home(self) -> Path:
        """Directory that the installer manages."""
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
        """True if the link `current` now leads to another version."""
        return self.is_by_installer and self.newest != self.environment

    @property
    def newest(self) -> Path:
        return self._current.resolve()

    @property
    def newest_release(self) -> str:
        """Release of the version to which the link `current` leads; empty = unknown."""
        places = [str(path) for path in self.newest.glob("lib/python*/site-packages")]
        return next((one.version for one in metadata.distributions(name=NAME, path=places)), "")

    @property
    def _current(self) -> Path:
        return self.home / "current"

    @property
    def installer(self) -> Path:
        system = "macos" if sys.platform == "darwin" else "linux"
        return self.environment / "installers" / system / "install.sh"

    def given(self) -> Given | None:
        """Return the arguments from the note that the installer left; None if there is no readable note."""
        try:
            fields: Mapping[str, Any] = json.loads((self.environment / _NOTE).read_text(encoding="utf-8"))
            return Given(
                origin=SourceKind(fields["origin"]),
                source=str(fields["source"]),
                options=tuple(str(option) for option in fields["options"]),
                environment={str(name): str(value) for name, value in dict(fields["environment"]).items()},
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note(self) -> Note | None:
        """Return the note that the installer left about its source, with the source's present state; None if there is
        no readable note.
        """
        given = self.given()
        if given is None:
            return None
        if given.origin is not SourceKind.WHEELHOUSE or "://" in given.source:
            return Note(origin=given.origin, source=given.source)
        path = Path(given.source)
        is_there = path.is_file() or (path / _MANIFEST).is_file()
        return Note(origin=given.origin, source=given.source, is_there=is_there, is_owners=is_there and is_owners(path))


def is_owners(path: Path) -> bool:
    """Return True if only this user and the system can replace `path` or change its content.

    The user's own group counts as the user, as for the usual umask of 002. Returns False for an unreadable path. Raises
    nothing.
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
        return False  # On Windows, file modes do not show who may write.
    if is_above and found.st_mode & stat.S_ISVTX:
        return True  # With the sticky bit, as in /tmp, users cannot remove or rename the files of others.
    is_link = stat.S_ISLNK(found.st_mode)  # The mode of a link itself has no meaning.
    by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getgid())
    return found.st_uid in (0, os.getuid()) and (is_link or not (found.st_mode & stat.S_IWOTH or by_group))
