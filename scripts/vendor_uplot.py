"""Downloads uPlot, which draws the pages' charts, unchanged into `hub/echo_hub/dashboard/static/`.

`python scripts/vendor_uplot.py` fetches the npm package with `npm pack`, checks its pinned version and hash, and
extracts the script, the style sheet and the licence. For another release, change the three values below; npm prints the
hash: `npm view uplot dist.integrity`.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

VERSION: Final = "1.6.32"
SHA512: Final = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
"""SHA-512 of the package, in npm's format."""
FILES: Final[Mapping[str, tuple[str, str]]] = {
    "package/dist/uPlot.iife.min.js": (
        "uplot.min.js",
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    ),
    "package/dist/uPlot.min.css": (
        "uplot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
    "package/LICENSE": ("uplot.LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
}
"""Extracted file -> (its name in this repository, its SHA-256)."""
DESTINATION: Final = Path(__file__).parents[1] / "hub" / "echo_hub" / "dashboard" / "static"


def unpack(package: Path, destination: Path) -> None:
    """Extract the files. Raises ValueError before any write if the package's hash differs from the pinned one."""
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if found != SHA512:
        raise ValueError(f"{package.name} is not the pinned release: its SHA-512 is {found}")
    with tarfile.open(package) as archive:
        for member, (name, _) in FILES.items():
            content = archive.extractfile(member)
            assert content is not None, member
            (destination / name).write_bytes(content.read())


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", f"uplot@{VERSION}"], cwd=scratch, check=True)
        unpack(Path(scratch) / f"uplot-{VERSION}.tgz", DESTINATION)


if __name__ == "__main__":
    main()
