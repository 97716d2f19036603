"""The service under a user's real systemd, in namespaces of its own: it starts, sees the session's bus, and ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import Paths

SYSTEMD: Final = Path("/usr/lib/systemd/systemd")
SESSION: Final = """
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
systemctl --user is-active dbus.socket || systemctl --user start dbus.socket || true
node="$PYTHON -m echo_node.main"
$node service install --data-dir "$DATA"
until $node status --json --data-dir "$DATA" > "$HOME/status.json" 2> "$HOME/status.err"; do sleep 0.2; done
$node service status --data-dir "$DATA" > "$HOME/shown"
pid=$(systemctl --user show --property MainPID --value echo-node.service)
tr '\\0' '\\n' < "/proc/$pid/environ" > "$HOME/environ"
readlink "/proc/$pid/ns/mnt" /proc/self/ns/mnt > "$HOME/namespaces"
$node service uninstall --data-dir "$DATA"
! kill -0 "$pid" 2>/dev/null
systemctl --user --no-pager list-units --all 'echo-node*' > "$HOME/units"
"""
"""systemd wants to be booted, by the sign of a directory, and hierarchies of control groups that it may write to."""


def _can_run() -> str:
    """Why not; empty: it can."""
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "no systemd here"
    if os.geteuid() != 0:
        return "namespaces with mounts take root here"
    return ""


@pytest.mark.skipif(bool(_can_run()), reason=_can_run() or "it can")
def test_a_users_systemd_runs_the_node(tmp_path: Path) -> None:
    home, data = tmp_path / "home", tmp_path / "data"
    (home / ".config").mkdir(parents=True)
    nowhere = HubRecord(url="http://127.0.0.1:9", hub_key_hex="00" * 32, joined_at=0.0)
    Hubs(Paths.find(data)).save(nowhere)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "DBUS_", "ECHO_"))}
    root = Path(__file__).resolve().parents[3]
    packages = os.pathsep.join(str(root / name) for name in ("edge_client", "shared"))
    environment = {
        **kept,
        "HOME": str(home),
        "PYTHON": sys.executable,
        "PYTHONPATH": packages,
        "DATA": str(data),
        "SYSTEMD": str(SYSTEMD),
    }
    command = ["unshare", "--mount", "--pid", "--cgroup", "--fork", "--mount-proc", "--kill-child", "sh", "-c", SESSION]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    except subprocess.TimeoutExpired:
        seen = {path.name: path.read_text(errors="replace")[-2_000:] for path in home.iterdir() if path.is_file()}
        pytest.fail(json.dumps(seen, indent=1))
    assert ran.returncode == 0, ran.stdout + ran.stderr + (home / "systemd.log").read_text()
    assert "active (running)" in (home / "shown").read_text()
    assert json.loads((home / "status.json").read_text())["connected"] is False
    variables = dict(line.partition("=")[::2] for line in (home / "environ").read_text().splitlines())
    assert variables["XDG_RUNTIME_DIR"] == "/run/user/0"
    node, session = (home / "namespaces").read_text().split()
    assert node == session, "the service sees the files that the session sees"
    if Path("/usr/lib/systemd/user/dbus.socket").exists():
        assert variables["DBUS_SESSION_BUS_ADDRESS"] == "unix:path=/run/user/0/bus"
    assert "echo-node.service" not in (home / "units").read_text()
    assert not list(home.rglob("echo-node.service"))
    assert not Paths.find(data).control_file.exists()
