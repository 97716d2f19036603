"""What the macOS installer chooses, on a Mac of either kind; the rest is posix.sh, tested on Linux."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(("machine", "extra"), [("arm64", "mlx"), ("x86_64", "cpu")])
def test_the_engine_follows_the_processor(home: Any, tmp_path: Path, machine: str, extra: str) -> None:
    uname = tmp_path / "bin" / "uname"
    uname.parent.mkdir()
    uname.write_text(f"#!/bin/sh\necho {machine}\n")
    uname.chmod(0o755)
    install = home.checkout / "installers" / "macos" / "install.sh"
    shown = home.run("env", f"PATH={uname.parent}:{home.environment['PATH']}", install, "--help")
    assert shown.returncode == 0, shown.stdout
    assert f"here {extra}\n" in shown.stdout
    assert home.tree() == {}
