"""Runs this copy's installer with its original source, and starts the installed version.

The installer must outlive the node: if the node is a service, the installer stops the service, then starts the new
version, or the old version again. systemd ends all processes of a service together, so under systemd the installer runs
as a separate unit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from echo_node.host.installed_copy import Given, InstalledCopy
from echo_node.host.paths import HOME_VARIABLE
from echo_node.host.service import UNIT as SERVICE_UNIT
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

UNIT: Final = "echo-node-update"
LONGEST_S: Final = 3_600.0
"""Time limit of an installer, in seconds."""
_LOOK_S: Final = 0.2
_MOST_SAID: Final = 300
"""Maximum length of an installer's result, in characters."""
_CGROUPS: Final = Path("/proc/self/cgroup")


def command(copy: InstalledCopy, given: Given) -> list[str]:
    """Return the installer's command. `--running` keeps the files of the running version."""
    return [str(copy.installer), "--from", given.source, *given.options, "--running"]


def as_unit(installer: Sequence[str], environment: Mapping[str, str], log_file: Path) -> list[str]:
    """Return the command that runs the installer as a unit of the user's systemd, and waits for its end."""
    output = f"append:{log_file}"
    return [
        *("systemd-run", "--user", "--collect", "--quiet", "--wait", f"--unit={UNIT}"),
        *("-p", f"StandardOutput={output}", "-p", f"StandardError={output}", "-p", f"RuntimeMaxSec={LONGEST_S:.0f}"),
        *(f"--setenv={name}={value}" for name, value in sorted(environment.items())),
        *("--", *installer),
    ]


def is_in_service(cgroups: str) -> bool:
    """Return True if a process with these contents of /proc/PID/cgroup belongs to the node's service."""
    return any(line.endswith(f"/{SERVICE_UNIT}") for line in cgroups.splitlines())


async def install(copy: InstalledCopy, given: Given, log_file: Path) -> str:
    """Run the installer. Return "" on success, else its last message. Its output goes to the log file.

    If this call is cancelled, the installer continues by itself and still leaves a complete version. Raises OSError if
    the installer cannot be started.
    """
    process, began = _start(copy, given, log_file)
    status = await _end_of(process)
    return "" if status == 0 else _last_words(log_file, began) or f"The installer ended with status {status}."


def _start(copy: InstalledCopy, given: Given, log_file: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the installer. Return its process, and the offset in the log at which its output begins."""
    kept = {key: os.environ[key] for key in (HOME_VARIABLE, "PATH") if key in os.environ}
    environment = {**kept, **given.environment}
    line = command(copy, given)
    if _CGROUPS.exists() and is_in_service(_CGROUPS.read_text(encoding="utf-8")):
        line = as_unit(line, environment, log_file)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        began = output.tell()  # Store the position now: the installer's output moves it.
        process = subprocess.Popen(
            line,
            cwd=copy.home,
            env={**_without_python(os.environ), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its own session keeps Ctrl-C, and the end of a LaunchAgent, from ending the installer.
            start_new_session=True,
        )
        return process, began


def _without_python(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without this interpreter's variables, which would mislead another interpreter."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTHON")}


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Return the installer's exit status. The process is polled: a waiting thread cannot be cancelled, and would delay
    a stopping node.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + LONGEST_S
    while (status := process.poll()) is None:
        if loop.time() > ends_at:
            log.error("The installer has not ended within %.0f s and is killed.", LONGEST_S)
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.sleep(_LOOK_S)
    return status


def _last_words(log_file: Path, began: int) -> str:
    """Return the installer's own error text, else its last line."""
    with log_file.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").split("\n")
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    found = errors or [line for line in lines if line.strip()]
    return printable_line(found[-1])[:_MOST_SAID] if found else ""


def come_back(copy: InstalledCopy, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the installed version, with these arguments of `echo-node`. Raises OSError on failure."""
    python = str(copy.newest / "bin" / "python")
    logging.shutdown()
    if sys.stdout is not None:
        sys.stdout.flush()
    os.execv(python, [python, "-m", "echo_node", *arguments])
