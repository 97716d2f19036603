"""axe-core, which checks the accessibility of pages. npm fetches it on use; its hash is pinned."""

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
"""Hash of the package, in npm's form."""
SCRIPT: Final = "package/axe.min.js"
RUN: Final = "async () => (await axe.run({ resultTypes: ['violations'] })).violations"


def lacks() -> str:
    """Why this machine cannot run axe-core; empty if it can."""
    return "" if shutil.which("npm") else "npm, which fetches axe-core"


def fetched(scratch: Path) -> str:
    """Fetch the script with npm. Raises ValueError if it is not the pinned release."""
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
    """Count elements that violate rules, by impact. Critical violations count as serious."""
    counts = {"serious": 0, "moderate": 0, "minor": 0}
    for violation in violations:
        impact = "serious" if violation["impact"] == "critical" else violation["impact"]
        counts[impact] += len(violation["nodes"])
    return counts


def said_of(violations: list[Mapping[str, Any]]) -> list[str]:
    """Describe each violated rule, with the first element that violates it."""
    return [
        f"{violation['impact']}: {violation['id']}: {violation['nodes'][0]['target']} ({len(violation['nodes'])})"
        for violation in violations
    ]
