"""Service files for every platform, installed with a scripted service manager that records its calls."""

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from echo_node.host import service
from echo_shared.errors import ConfigError

COMMAND = ["/opt/my node/python", "-m", "echo_node.main", "run", "--data-dir", '/data/100% "mine"/$x']


def test_the_systemd_unit_runs_the_command(tmp_path: Path) -> None:
    made = service.systemd_unit(COMMAND, {"ECHO_NODE_HOME": "/home/a b"}, tmp_path)
    assert made.path == tmp_path / "systemd" / "user" / "echo-node.service"
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(made.content.decode())
    assert parser["Service"]["ExecStart"] == (
        '"/opt/my node/python" "-m" "echo_node.main" "run" "--data-dir" "/data/100%% \\"mine\\"/$$x"'
    )
    assert parser["Service"]["Environment"] == '"ECHO_NODE_HOME=/home/a b"'
    assert parser["Service"]["Restart"] == "on-failure"
    assert parser["Install"]["WantedBy"] == "default.target"
    # The sensors of the owner's activity need the session's D-Bus, and sockets below /tmp.
    assert parser["Unit"]["Wants"] == parser["Unit"]["After"] == "dbus.socket"
    assert not {key for key in parser["Service"] if key.startswith(("Private", "Protect", "InaccessiblePaths"))}
    assert "DBUS_SESSION_BUS_ADDRESS" not in made.content.decode(), "the service manager's own variable is used"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    made = service.systemd_unit([sys.executable, "-m", "echo_node.main", "run"], {}, tmp_path)
    made.path.parent.mkdir(parents=True)
    made.path.write_bytes(made.content)
    command = ["systemd-analyze", "--user", "verify", str(made.path)]
    verified = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert "echo-node.service" not in verified.stderr


def test_the_launch_agent_runs_the_command(tmp_path: Path) -> None:
    made = service.launch_agent(COMMAND, {"ECHO_NODE_HOME": "/h"}, tmp_path, log=tmp_path / "log", uid=501)
    assert made.path == tmp_path / "Library" / "LaunchAgents" / "org.echo-swarm.node.plist"
    content = plistlib.loads(made.content)
    assert content["ProgramArguments"] == COMMAND
    assert content["EnvironmentVariables"] == {"ECHO_NODE_HOME": "/h"}
    assert content["RunAtLoad"] is True and content["KeepAlive"] == {"SuccessfulExit": False}
    assert made.install == (("launchctl", "bootstrap", "gui/501", str(made.path)),)


def test_the_logon_task_runs_the_command(tmp_path: Path) -> None:
    made = service.logon_task(COMMAND, tmp_path, user="HOME\\R&D")
    root = ET.fromstring(made.content.decode("utf-16"))
    names = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert root.findtext(".//t:Exec/t:Command", namespaces=names) == COMMAND[0]
    assert root.findtext(".//t:Exec/t:Arguments", namespaces=names) == subprocess.list2cmdline(COMMAND[1:])
    assert root.findtext(".//t:LogonTrigger/t:UserId", namespaces=names) == "HOME\\R&D"
    assert root.findtext(".//t:ExecutionTimeLimit", namespaces=names) == "PT0S"
    assert made.content.startswith((b"\xff\xfe", b"\xfe\xff"))
    assert [command[1] for command in made.uninstall] == ["/End", "/Delete"]


@pytest.mark.skipif(shutil.which("xmllint") is None, reason="no xmllint here")
def test_the_logon_task_fits_windows_schema(tmp_path: Path) -> None:
    made = service.logon_task(COMMAND, tmp_path, user="HOME\\R&D")
    task, schema = tmp_path / "task.xml", Path(__file__).with_name("task.xsd")
    for count, status in (("255", 0), ("256", 3)):
        task.write_bytes(made.content.decode("utf-16").replace("255", count).encode("utf-16"))
        command = ["xmllint", "--noout", "--nonet", "--schema", str(schema), str(task)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert checked.returncode == status, checked.stderr


def test_the_service_goes_by_the_installers_link(tmp_path: Path) -> None:
    environment = tmp_path / "versions" / "1"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    assert service.lasting(python, environment) == python
    (tmp_path / "current").symlink_to(Path("versions", "1"), target_is_directory=True)
    assert service.lasting(python, environment) == tmp_path / "current" / "bin" / "python"
    by_link = tmp_path / "current" / "bin" / "python"
    assert service.lasting(by_link, tmp_path / "current") == by_link
    other = tmp_path / "versions" / "2"
    assert service.lasting(other / "bin" / "python", other) == other / "bin" / "python"


@pytest.mark.parametrize("name", ["home", 'it\'s "mine" \\ 100%'])
def test_a_windows_task_sets_its_environment_in_its_command(tmp_path: Path, name: str) -> None:
    home = tmp_path / name.replace('"', "" if sys.platform == "win32" else '"')
    arguments = service.in_environment({"ECHO_NODE_HOME": str(home)})
    environment = {key: value for key, value in os.environ.items() if key != "ECHO_NODE_HOME"}
    command = [sys.executable, *arguments, "id", "show"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert "node id" in shown.stdout and (home / "identity.key").exists()
    assert service.in_environment({}) == ["-m", "echo_node.main"]


def test_this_platform_has_a_service_manager(tmp_path: Path) -> None:
    made = service.for_this_platform(tmp_path, {})
    assert str(tmp_path).encode() in made.content.replace(b"\x00", b"")


def on_path(directory: Path, monkeypatch: pytest.MonkeyPatch, *, exit_status: int) -> Path:
    """Put a service manager on PATH that records its calls; return the file of these records."""
    directory.mkdir()
    calls = directory / "calls"
    script = directory / "systemctl"
    script.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\necho "said something" >&2\nexit {exit_status}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return calls


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the service manager")
def test_installs_and_uninstalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = on_path(tmp_path / "bin", monkeypatch, exit_status=0)
    made = service.systemd_unit(COMMAND, {}, tmp_path)
    assert service.status(made) == "not installed"
    service.install(made)
    assert made.path.read_bytes() == made.content
    assert calls.read_text().splitlines() == [
        "--user show-environment",
        "--user daemon-reload",
        "--user enable echo-node.service",
        "--user restart echo-node.service",
    ]
    assert service.status(made) == "said something"
    assert service.uninstall(made)
    assert not made.path.exists()
    assert not service.uninstall(made)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the service manager")
def test_an_unresponsive_service_manager_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(tmp_path / "bin", monkeypatch, exit_status=1)
    made = service.systemd_unit(COMMAND, {}, tmp_path)
    with pytest.raises(ConfigError, match="said something") as caught:
        service.install(made)
    assert caught.value.code == "no_service_manager"
    assert not made.path.exists()


def test_a_missing_service_manager_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="this command does not exist"):
        service.install(service.systemd_unit(COMMAND, {}, tmp_path))
