"""The choices of the macOS installer on both kinds of Mac. The rest of it, posix.sh, is tested on Linux."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

INSTALLER = Path("installers", "macos", "install.sh")
OnMac = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def on_mac(home: Any, tmp_path: Path) -> OnMac:
    """Return `on_mac(machine, release, *command)`. It runs a command while `uname` names such a Mac."""

    def run(machine: str, release: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
        uname = tmp_path / "bin" / "uname"
        uname.parent.mkdir()
        uname.write_text(f"#!/bin/sh\ncase $1 in -r) echo {release} ;; -m) echo {machine} ;; *) exit 2 ;; esac\n")
        uname.chmod(0o755)
        done: subprocess.CompletedProcess[str] = home.run(
            "env", f"PATH={uname.parent}:{home.environment['PATH']}", *command
        )
        return done

    return run


@pytest.mark.parametrize(("machine", "extra"), [("arm64", "mlx"), ("x86_64", "cpu")])
def test_the_engine_follows_the_processor(home: Any, on_mac: OnMac, machine: str, extra: str) -> None:
    shown = on_mac(machine, "24.1.0", home.checkout / INSTALLER, "--help")
    assert shown.returncode == 0, shown.stdout
    assert f"here {extra}\n" in shown.stdout
    assert home.tree() == {}


def test_a_macos_too_old_for_libtorrent_is_refused_first(home: Any, on_mac: OnMac) -> None:
    done = on_mac("arm64", "22.6.0", home.checkout / INSTALLER)
    assert done.returncode == 1
    assert "macOS 14 or newer" in done.stdout and "Update macOS" in done.stdout
    assert home.tree() == {}


@pytest.mark.parametrize(
    ("machine", "pin"), [("arm64", "cryptography=="), ("x86_64", "cryptography<49")], ids=["arm64", "intel"]
)
def test_an_intel_mac_gets_the_last_cryptography_for_it(home: Any, on_mac: OnMac, machine: str, pin: str) -> None:
    pins = home.checkout / "constraints.txt"
    script = f'. {home.checkout}/installers/macos/settings.sh && sed -e "${{pins_edit:-}}" {pins}'
    edited = on_mac(machine, "23.0.0", "sh", "-c", script).stdout.splitlines()
    before = pins.read_text(encoding="utf-8").splitlines()
    changed = [new for new, old in zip(edited, before, strict=True) if new != old]
    assert changed == ([pin] if machine == "x86_64" else [])
    assert any(line.startswith(pin) for line in edited)
