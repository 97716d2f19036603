"""The node as a service of its user's session: a systemd user unit, a LaunchAgent, or a Windows logon task.

Rendering the service's file works on every platform; `install`, `uninstall` and `status` run the platform's own
command.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from echo_node.host.paths import home
from echo_shared.errors import ConfigError, StorageError

UNIT: Final = "echo-node.service"
LABEL: Final = "org.echo-swarm.node"
TASK: Final = "Echo node"
MODULE: Final = "echo_node.main"
COMMAND_S: Final = 60.0

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A platform's service file, and the commands that manage the service."""

    path: Path
    content: bytes
    probe: Command
    """Command that succeeds only if the platform has this kind of service."""
    install: tuple[Command, ...]
    uninstall: tuple[Command, ...]
    """Commands to stop and remove the service. They may fail, because the service may already be stopped."""
    status: Command


def systemd_unit(command: Sequence[str], environment: Mapping[str, str], config_home: Path) -> Service:
    """Render a systemd *user* unit. It needs no root, and may use the user's session, with its files in /tmp and its
    D-Bus.
    """
    settings = "".join(f"Environment={_systemd_quoted(f'{key}={value}')}\n" for key, value in environment.items())
    content = (
        "[Unit]\n"
        "Description=Echo node: lends this computer to train language models\n"
        "StartLimitIntervalSec=0\n"
        # Request the session bus, which reports the owner's activity. Its socket puts the bus address into systemd's
        # environment.
        "Wants=dbus.socket\n"
        "After=dbus.socket\n"
        "\n"
        "[Service]\n"
        f"ExecStart={' '.join(_systemd_quoted(part.replace('$', '$$')) for part in command)}\n"
        f"{settings}"
        "Restart=on-failure\n"
        "RestartSec=30\n"
        # Continue after an out-of-memory kill: the kernel kills only the engine's process, which the node restarts.
        "OOMPolicy=continue\n"
        "TimeoutStopSec=30\n"
        "Nice=10\n"
        # Niceness counts only among processes of one control group. CPUWeight is the weight of the whole group; others
        # have 100.
        "CPUWeight=5\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )
    systemctl = ("systemctl", "--user")
    return Service(
        path=config_home / "systemd" / "user" / UNIT,
        content=content.encode(),
        probe=(*systemctl, "show-environment"),
        install=((*systemctl, "daemon-reload"), (*systemctl, "enable", UNIT), (*systemctl, "restart", UNIT)),
        uninstall=((*systemctl, "disable", "--now", UNIT),),
        status=(*systemctl, "--no-pager", "status", UNIT),
    )


def launch_agent(command: Sequence[str], environment: Mapping[str, str], home: Path, *, log: Path, uid: int) -> Service:
    """Render a LaunchAgent. It runs at background priority while the user is logged in."""
    content = plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "EnvironmentVariables": dict(environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ProcessType": "Background",
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    )
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    domain = f"gui/{uid}"
    return Service(
        path=path,
        content=content,
        probe=("launchctl", "print", domain),
        install=(("launchctl", "bootstrap", domain, str(path)),),
        uninstall=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        status=("launchctl", "print", f"{domain}/{LABEL}"),
    )


def logon_task(command: Sequence[str], data_dir: Path, *, user: str) -> Service:
    """Render a logon task. A Windows *service* would see neither the GPU nor the user."""
    arguments = escape(subprocess.list2cmdline(command[1:]))
    content = (
        '<?xml version="1.0" encoding="UTF-16"?>\n'
        '<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">\n'
        "  <Triggers><LogonTrigger><Enabled>true</Enabled>"
        f"<UserId>{escape(user)}</UserId></LogonTrigger></Triggers>\n"
        f'  <Principals><Principal id="Author"><UserId>{escape(user)}</UserId>'
        "<LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel></Principal></Principals>\n"
        "  <Settings>\n"
        "    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>\n"
        "    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>\n"
        "    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>\n"
        "    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>\n"
        "    <Priority>7</Priority>\n"
        "    <RestartOnFailure><Interval>PT1M</Interval><Count>255</Count></RestartOnFailure>\n"
        "  </Settings>\n"
        f'  <Actions Context="Author"><Exec><Command>{escape(command[0])}</Command>'
        f"<Arguments>{arguments}</Arguments></Exec></Actions>\n"
        "</Task>\n"
    )
    path = data_dir / "logon-task.xml"
    return Service(
        path=path,
        content=content.encode("utf-16"),
        probe=("schtasks", "/Query", "/FO", "LIST"),
        install=(("schtasks", "/Create", "/TN", TASK, "/XML", str(path), "/F"), ("schtasks", "/Run", "/TN", TASK)),
        # Stop the task first: deleting a running task does not stop it.
        uninstall=(("schtasks", "/End", "/TN", TASK), ("schtasks", "/Delete", "/TN", TASK, "/F")),
        status=("schtasks", "/Query", "/TN", TASK, "/V", "/FO", "LIST"),
    )


def for_this_platform(data_dir: Path, environment: Mapping[str, str]) -> Service:
    """Return the service that runs `echo-node run` on `data_dir`, for this platform."""
    arguments = ["run", "--data-dir", str(data_dir)]
    python = lasting(Path(sys.executable), Path(sys.prefix))
    command = [str(python), "-m", MODULE, *arguments]
    if sys.platform == "win32":
        windowless = python.with_name("pythonw.exe")
        command = [str(windowless if windowless.exists() else python), *in_environment(environment), *arguments]
        user = f"{os.environ.get('USERDOMAIN', '.')}\\{os.environ.get('USERNAME', '')}"
        return logon_task(command, data_dir, user=user)
    if sys.platform == "darwin":
        log = data_dir / "logs" / "service.log"
        return launch_agent(command, environment, home(), log=log, uid=os.getuid())
    config_home = os.environ.get("XDG_CONFIG_HOME")
    return systemd_unit(command, environment, Path(config_home) if config_home else home() / ".config")


def lasting(python: Path, environment: Path) -> Path:
    """Return the interpreter's path through the installer's link `current`, which stays valid after an upgrade; without
    such a link, return the path itself.
    """
    current = environment.parent.parent / "current"
    if current.resolve() != environment.resolve() or not python.is_relative_to(environment):
        return python
    return current / python.relative_to(environment)


def in_environment(environment: Mapping[str, str]) -> list[str]:
    """Return Python's arguments that run the node with `environment`, because a Windows task has no environment
    variables.
    """
    if not environment:
        return ["-m", MODULE]
    run = f"runpy.run_module({MODULE!r}, run_name='__main__', alter_sys=True)"
    return ["-c", f"import os, runpy; os.environ.update({dict(environment)!r}); {run}"]


def install(service: Service) -> None:
    """Write the file and start the service, in place of an earlier one. Raises ConfigError if the platform cannot do
    so.
    """
    uninstall(service)
    _check(service)
    try:
        service.path.parent.mkdir(parents=True, exist_ok=True)
        service.path.write_bytes(service.content)
    except OSError as error:
        raise StorageError("The service's file cannot be written.", got=f"{service.path}: {error.strerror}") from error
    for command in service.install:
        _run_or_raise(command)


def uninstall(service: Service) -> bool:
    """Stop the service and delete its file. Return False if it is not installed."""
    if not service.path.exists():
        return False
    _check(service)
    for command in service.uninstall:
        _run(command)
    service.path.unlink()
    return True


def status(service: Service) -> str:
    if not service.path.exists():
        return "not installed"
    _check(service)
    result = _run(service.status)
    return (result.stdout or result.stderr).strip()


def _check(service: Service) -> None:
    reason = "this command does not exist"
    if shutil.which(service.probe[0]) is not None:
        result = _run(service.probe)
        if result.returncode == 0:
            return
        reason = (result.stderr or result.stdout).strip() or f"exit status {result.returncode}"
    raise ConfigError(
        "This system has no service manager for users that the node could use.",
        got=f"{' '.join(service.probe)}: {reason}",
        do="Log in to a full session and try again, or start the node yourself: echo-node run",
        code="no_service_manager",
    )


def _run(command: Command) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False)


def _run_or_raise(command: Command) -> None:
    result = _run(command)
    if result.returncode != 0:
        raise ConfigError(
            "The service could not be installed.",
            got=f"{' '.join(command)}: {(result.stderr or result.stdout).strip() or result.returncode}",
            do="Fix the problem above, then: echo-node service install",
        )


def _systemd_quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
