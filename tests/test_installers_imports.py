"""The installers try a new version before they switch to it, by importing modules of Echo by name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

INSTALLERS = Path(__file__).resolve().parents[1] / "installers"
IMPORT = re.compile(r"(?:from|import) (echo_[a-z]+(?:\.\w+)*)")


@pytest.mark.parametrize("script", ["posix.sh", "windows/install.ps1"])
def test_every_module_that_an_installer_imports_exists(script: str) -> None:
    modules = IMPORT.findall((INSTALLERS / script).read_text(encoding="utf-8"))
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
