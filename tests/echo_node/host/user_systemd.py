"""A user's real systemd in its own namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

SYSTEMD: Final = Path("/usr/lib/systemd/systemd")
BOOT: Final = """
set -eu
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/user/0
chmod 700 /run/user/0
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
export XDG_RUNTIME_DIR=/run/user/0
"$SYSTEMD" --user > "$HOME/systemd.log" 2>&1 &
until systemctl --user show-environment > /dev/null 2>&1; do kill -0 $!; sleep 0.1; done
"""
"""Starts systemd, which needs writable control groups and a directory that marks a booted system."""


def why_not() -> str:
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "no systemd here"
    if os.geteuid() != 0:
        return "namespaces with mounts take root here"
    return ""


def run_in_session(script: str, home: Path, environment: Mapping[str, str]) -> None:
    """Run shell commands in the user's session; `PYTHON` in them is this interpreter. Raises an error with their output
    if they fail.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "DBUS_", "ECHO_"))}
    root = Path(__file__).resolve().parents[3]
    own = {
        "HOME": str(home),
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(str(root / name) for name in ("edge_client", "shared")),
        "SYSTEMD": str(SYSTEMD),
    }
    alone = ("unshare", "--mount", "--pid", "--cgroup", "--fork", "--mount-proc", "--kill-child")
    try:
        ran = subprocess.run(
            [*alone, "sh", "-c", BOOT + script],
            env={**kept, **own, **environment},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    except subprocess.TimeoutExpired:
        seen = {path.name: path.read_text(errors="replace")[-2_000:] for path in home.iterdir() if path.is_file()}
        pytest.fail(json.dumps(seen, indent=1))
    assert ran.returncode == 0, ran.stdout + ran.stderr + (home / "systemd.log").read_text()
