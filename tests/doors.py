"""Skips tests of clients' libraries (such as the tinker SDK) unless `make doors` has built their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.tenant_site import CLIENTS_PYTHON, lacking


def doors_python() -> Path:
    """Return the interpreter with the clients' libraries. Skip the test if `make doors` has not run."""
    if lacks := lacking():
        pytest.skip(lacks)
    return CLIENTS_PYTHON
