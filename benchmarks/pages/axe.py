"""axe-core, which finds what of a page some people cannot use: fetched with npm when it is wanted, by its hash."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

VERSION: Final = "4.14.1"
SHA512: Final = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
"""Of the package, as npm writes it."""
SCRIPT: Final = "package/axe.min.js"
RUN: Final = "async () => (await axe.run({ resultTypes: ['violations'] })).violations"


def lacks() -> str:
    """What this machine does not have for it; empty: nothing."""
    return "" if shutil.which("npm") else "npm, which fetches axe-core"


def fetched(scratch: Path) -> str:
    """The script."""
    command = ["npm", "pack", "--silent", f"axe-core@{VERSION}"]
    subprocess.run(command, cwd=scratch, check=True, capture_output=True)
    package = scratch / f"axe-core-{VERSION}.tgz"
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if found != SHA512:
        raise ValueError(f"{package.name} is not the pinned release: its SHA-512 is {found}")
    with tarfile.open(package) as archive:
        content = archive.extractfile(SCRIPT)
        assert content is not None
        return content.read().decode()


def found_on(violations: list[Mapping[str, Any]]) -> dict[str, int]:
    """How many elements violate rules, by how bad that is; serious ones are with the critical."""
    counts = {"serious": 0, "moderate": 0, "minor": 0}
    for violation in violations:
        impact = "serious" if violation["impact"] == "critical" else violation["impact"]
        counts[impact] += len(violation["nodes"])
    return counts


def said_of(violations: list[Mapping[str, Any]]) -> list[str]:
    """Each rule that is violated, with the first element that does."""
    return [
        f"{violation['impact']}: {violation['id']}: {violation['nodes'][0]['target']} ({len(violation['nodes'])})"
        for violation in violations
    ]
