"""Run an environment's program in its cage (sandbox), with the same command line as the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from echo_shared import cage
from echo_shared.cage.session_terms import SessionTerms

ROOT = Path(__file__).resolve().parents[3]
WARDEN = Path(cage.__path__[0], "warden.py")


def command(terms: SessionTerms, *program: str, parent: int | None = None, python: str = sys.executable) -> list[str]:
    """Return the command for a warden of process `parent` (default: this process)."""
    Path(terms.directory).mkdir(exist_ok=True)
    hub = str(os.getpid() if parent is None else parent)
    return [sys.executable, "-I", "-S", str(WARDEN), terms.to_text(), hub, python, *program]


def environment() -> dict[str, str]:
    """Return this process's environment, with a secret and a path on which the tests' modules are found."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "ECHO_TEST_SECRET": "secret"}


def run(terms: SessionTerms, *program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(terms, *program),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
