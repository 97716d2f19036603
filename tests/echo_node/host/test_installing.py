"""Updates by scripted installers of a few lines, run like the real installer, which tests/installers tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from echo_node.host.installing import as_unit, command, install, is_in_service
from tests.echo_node.host.installed import make_copy, note
from tests.echo_node.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the installer of Windows notes nothing")


def test_the_installer_gets_the_same_options_again(tmp_path: Path) -> None:
    copy = make_copy(tmp_path)
    note(copy.environment, source="/a b/x.tar", options=["--python", "/usr/bin/python3"])
    given = copy.given()
    assert given is not None
    assert command(copy, given) == [
        str(copy.installer),
        *("--from", "/a b/x.tar", "--python", "/usr/bin/python3", "--running"),
    ]


def test_systemd_runs_the_installer_as_its_own_unit(tmp_path: Path) -> None:
    line = as_unit(["/x/install.sh", "--from", "y"], {"HOME": "/home/ada", "A": "b c"}, tmp_path / "update.log")
    assert line[:3] == ["systemd-run", "--user", "--collect"] and "--wait" in line
    assert line[-6:] == ["--setenv=A=b c", "--setenv=HOME=/home/ada", "--", "/x/install.sh", "--from", "y"]
    assert f"StandardOutput=append:{tmp_path}/update.log" in line


@pytest.mark.parametrize(
    ("cgroups", "ends"),
    [
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/echo-node.service\n", True),
        ("1:name=systemd:/echo-node.service\n0::/x\n", True),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", False),
        ("0::/user.slice/user@1000.service/app.slice/app-gnome-terminal.scope\n", False),
        ("", False),
    ],
)
def test_processes_that_end_with_the_nodes_unit(cgroups: str, ends: bool) -> None:
    assert is_in_service(cgroups) == ends


async def test_the_installers_output_is_logged_and_its_error_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/astray")
    monkeypatch.setenv("HOME", "/not/where/it/was/installed")
    said = 'echo "at $HOME, ${PYTHONPATH:-unled}, with $*"'
    copy, log = make_copy(tmp_path, said), tmp_path / "logs" / "update.log"
    given = copy.given()
    assert given is not None
    assert await install(copy, given, log) == ""
    assert log.read_text() == f"at {copy.environment}, unled, with --from {tmp_path}/echo.tar --running\n"
    for ending, told in (
        ("echo 'error: one\033[2J'; echo two; exit 1", "one?[2J"),
        ("echo two; echo; exit 3", "two"),
        ("exit 3", "The installer ended with status 3."),
    ):
        copy.installer.write_text(f"#!/bin/sh\n{ending}\n")
        assert await install(copy, given, log) == told
    assert log.read_text().startswith("at "), "earlier output stays"
    copy.installer.unlink()
    with pytest.raises(FileNotFoundError):
        await install(copy, given, log)


async def test_the_installer_survives_the_end_of_its_node(tmp_path: Path) -> None:
    """Installers end the node in order to replace it, so they must survive the node's end."""
    go_on, done = tmp_path / "go on", tmp_path / "done"
    waits = f"until [ -e '{go_on}' ]; do sleep 0.05; done; touch '{done}'"
    copy = make_copy(tmp_path / "home", f"touch '{tmp_path}/begun'; {waits}")
    code = f"""
import asyncio
from pathlib import Path
from echo_node.host.installed_copy import InstalledCopy
from echo_node.host.installing import install

async def main():
    copy = InstalledCopy(Path({str(copy.environment)!r}))
    task = asyncio.create_task(install(copy, copy.given(), Path({str(tmp_path / "update.log")!r})))
    while not Path({str(tmp_path / "begun")!r}).exists():
        await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])

asyncio.run(main())
"""
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], check=True, timeout=60, capture_output=True
    )
    assert ran.returncode == 0 and not done.exists()
    go_on.touch()
    await until(done.exists)


def test_the_node_restarts_as_the_installed_version(tmp_path: Path) -> None:
    copy = make_copy(tmp_path)
    python = copy.environment / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    code = (
        "from pathlib import Path\nfrom echo_node.host.installed_copy import InstalledCopy\n"
        "from echo_node.host.installing import come_back\n"
        "print('before', flush=False)\n"
        f"come_back(InstalledCopy(Path({str(copy.environment)!r})), ['run', '--width', '4'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert ran.stdout == "before\n-m echo_node run --width 4\n"
