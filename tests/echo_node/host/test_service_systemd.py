"""The node's service under a user's real systemd: it starts, reaches the session's D-Bus and ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from tests.echo_node.host.user_systemd import run_in_session, why_not

SESSION: Final = """
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


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")
def test_a_users_systemd_runs_the_node(tmp_path: Path) -> None:
    home, data = tmp_path / "home", tmp_path / "data"
    (home / ".config").mkdir(parents=True)
    nowhere = HubRecord(url="http://127.0.0.1:9", hub_key_hex="00" * 32, joined_at=0.0)
    Hubs(NodePaths.find(data)).save(nowhere)
    run_in_session(SESSION, home, {"DATA": str(data)})
    assert "active (running)" in (home / "shown").read_text()
    assert json.loads((home / "status.json").read_text())["connected"] is False
    variables = dict(line.partition("=")[::2] for line in (home / "environ").read_text().splitlines())
    assert variables["XDG_RUNTIME_DIR"] == "/run/user/0"
    node, session = (home / "namespaces").read_text().split()
    assert node == session, "the service sees the same files as the session"
    if Path("/usr/lib/systemd/user/dbus.socket").exists():
        assert variables["DBUS_SESSION_BUS_ADDRESS"] == "unix:path=/run/user/0/bus"
    assert "echo-node.service" not in (home / "units").read_text()
    assert not list(home.rglob("echo-node.service"))
    assert not NodePaths.find(data).control_file.exists()
