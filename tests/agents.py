"""Finds the Python environment that `make agents` builds. It has the libraries TextArena and OpenEnv, which provide
environments for agents.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("ECHO_AGENTS", Path(__file__).resolve().parent.parent / "build" / "agents"))


def agents_python() -> Path:
    """Return the interpreter with TextArena and OpenEnv. Skip the test if `make agents` has not run."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        pytest.skip("no build/agents: run `make agents`")
    return python
