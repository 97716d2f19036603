from __future__ import annotations

import json
import sys
from pathlib import Path

from echo_node.host.installed_copy import InstalledCopy

SYSTEM = "macos" if sys.platform == "darwin" else "linux"
SWITCH = 'cd "$(dirname "$0")/../../../.." && mkdir -p versions/2/installers && ln -sfn versions/2 current'
"""The last command of every installer: switch to the new version."""


def make_copy(home: Path, installer: str = SWITCH, *, source: Path | str | None = None) -> InstalledCopy:
    """Make an installed copy whose source is the wheelhouse `source`, or a new wheelhouse."""
    environment = home / "versions" / "1"
    script = environment / "installers" / SYSTEM / "install.sh"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\nset -eu\n{installer}\n")
    script.chmod(0o755)
    (home / "current").symlink_to("versions/1")
    if source is None:
        source = home / "echo.tar"
        source.write_bytes(b"")
    note(environment, source=str(source))
    return InstalledCopy(home / "current")


def note(into: Path, /, **changed: object) -> None:
    noted = {"origin": "wheelhouse", "source": "", "options": [], "environment": {"HOME": str(into)}, **changed}
    (into / "source.json").write_text(json.dumps(noted))
