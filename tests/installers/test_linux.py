"""The real Linux installer in an empty home, and its uninstaller, which leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = Path("installers", "linux", "install.sh")
SCRIPTS = sorted((ROOT / "installers").rglob("*.sh"))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_install_and_contribute_by_one_command_upgrade_and_uninstall(home: Any, site: Any, until: Any) -> None:
    """The upgrade omits the engine, to save time. With --keep-identity, the uninstaller keeps the node's key."""
    (home.root / ".bashrc").write_text("# mine\n")
    home.echo_node.parent.mkdir(parents=True)
    home.echo_node.with_name("other").write_text("somebody else's")
    before = home.tree()
    run = await site.make_run(training={"steps": 5})
    hub, url = await site.hub(run)
    installer = home.checkout / INSTALLER
    volunteer = await site.program(installer, "--python", sys._base_executable, "--join", url, env=home.environment)
    await volunteer.printed("Connected", within_s=1_500)
    view = await until(url, lambda view: view["state"] == "finished")
    assert view["accounting"]["trained"] == 5 * 8 * 4
    assert sum(view["fetches_by_transport"].values()) >= 1
    status, said = await volunteer.end()
    assert status == 0, said
    assert "Engine: llama_cpp on cpu" in said
    assert (await hub.end())[0] == 0
    python = home.echo_node.resolve().parent / "python"
    assert home.run(python, "-c", "import llama_cpp; assert llama_cpp.llama_supports_rpc()").returncode == 0
    assert home.run(python, "-c", "import torch").returncode == 1

    version, identity = home.echo_node.resolve().parents[1], home.run(home.echo_node, "id", "show").stdout
    command = home.install("--extra", "none")
    assert command.resolve().parents[1] != version, "an upgrade makes a new environment"
    assert not version.exists()
    assert home.run(command, "id", "show").stdout == identity
    home.uninstall("--keep-identity")
    kept = {name for name in home.tree() if name not in before}
    assert kept == {".local/share", ".local/share/echo-node", ".local/share/echo-node/identity.key"}
    home.uninstall()
    assert home.tree() == {**before, ".local/share": "directory"}


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a real wheelhouse for this Python and processor, with llama.cpp from pip's cache."""
    out = tmp_path_factory.mktemp("dist")
    options = ["--variants", "native", "--pythons", f"{sys.version_info.major}.{sys.version_info.minor}", "--out", out]
    command = [sys.executable, ROOT / "scripts" / "make_wheelhouse.py", *options]
    made = subprocess.run(command, capture_output=True, text=True, timeout=1_500, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return out


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_a_hubs_one_line_command_installs_and_upgrades_and_uninstall_leaves_nothing(
    bare_home: Any, wheelhouse: Path, site: Any, until: Any, tmp_path: Path
) -> None:
    before = bare_home.tree()
    assert bare_home.run("sh", "-c", "command -v cc c++ gcc g++ clang cmake ninja make pip").stdout == ""
    run = await site.make_run(training={"steps": 3}, server={"install_from": str(wheelhouse / "serve")})
    hub, url = await site.hub(run)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    line = ("sh", "-c", f"curl -fsSL {url}/install.sh | sh -s -- --join {url}")
    environment = {**bare_home.environment, "TMPDIR": str(scratch)}
    volunteer = await site.program(*line, env=environment)
    await volunteer.printed("Connected", within_s=600)
    view = await until(url, lambda view: view["state"] == "finished")
    assert view["accounting"]["trained"] == 3 * 8 * 4
    assert not [path for path in scratch.iterdir() if path.name.startswith("tmp.")], "the archive is deleted by now"
    python = bare_home.echo_node.resolve().parent / "python"
    assert bare_home.run(python, "-c", "import torch").returncode == 1

    again = await site.program(*line, env=environment)
    await again.printed("This version is already installed", within_s=300)
    await again.ended()

    uninstall = bare_home.root / ".local/share/echo-swarm/current/installers/linux/uninstall.sh"
    done = bare_home.run(uninstall)
    assert done.returncode == 0, done.stdout
    await volunteer.ended()
    assert bare_home.tree() == before
    assert (await hub.end())[0] == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--python", "/bin/false"), "Python 3.11 or newer is needed, and /bin/false is not."),
        (("--source", "/no/such/checkout"), "/no/such/checkout does not exist (--source)."),
        (("--source", "echo-swarm"), "echo-swarm does not exist (--source)."),
        (("--token", "secret"), "--token and --service need --join URL."),
        (("--source",), "--source needs a value; see --help"),
        (("--fast",), "There is no option --fast; see --help"),
    ],
)
def test_a_wrong_call_is_explained_and_leaves_nothing(home: Any, options: tuple[str, ...], complaint: str) -> None:
    done = home.run(home.checkout / INSTALLER, *options)
    assert done.returncode == 1
    assert f"error: {complaint}" in done.stdout
    assert home.tree() == {}


def test_a_command_of_the_same_name_is_not_overwritten(home: Any) -> None:
    home.echo_node.parent.mkdir(parents=True)
    home.echo_node.write_text("somebody else's")
    before = home.tree()
    done = home.run(home.checkout / INSTALLER, "--python", sys.executable)
    assert done.returncode == 1
    assert f"{home.echo_node} exists already and does not belong to Echo." in done.stdout
    home.uninstall()
    assert home.tree() == before


def test_help_is_printed(home: Any) -> None:
    for script in (INSTALLER, INSTALLER.with_name("uninstall.sh")):
        done = home.run(home.checkout / script, "--help")
        assert (done.returncode, done.stdout[:6]) == (0, "usage:")
    assert home.tree() == {}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_directly_run_scripts_are_executable(script: Path) -> None:
    is_program = script.read_text(encoding="utf-8").startswith("#!")
    assert os.access(script, os.X_OK) == is_program


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
