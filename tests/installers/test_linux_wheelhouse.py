"""The common installer of Linux and macOS: install from a wheelhouse, upgrade, fall back, remove.

The installed programs are fakes of a few lines; test_linux.py installs the real node.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SWARM = Path(".local", "share", "echo-swarm")
SERVICE = Path(".config", "systemd", "user", "echo-node.service")
SAYS = (
    "home = __import__('pathlib').Path.home();"
    "sys.exit('no node runs') if 'status' in sys.argv and not (home / '.config').exists()"
    " else print('usage: echo-node {}', *sys.argv[1:])"
)
"""Source of a fake `echo-node` that prints its release. Its `status` succeeds only if ~/.config exists, as after an
installation of the service.
"""
RUNS = (
    "json = __import__('json'); print(json.dumps({'hub': 'https://old.example'}) if 'status' in sys.argv"
    " else ' '.join(['usage: echo-node', *sys.argv[1:]]))"
)
"""Source of a fake `echo-node`: its `status` shows a running node of another hub."""
DIES = "sys.exit('no such processor')"


def versions(home: Any) -> list[str]:
    return sorted(path.name for path in (home.root / SWARM / "versions").iterdir())


def said(home: Any) -> str:
    done = home.run(home.echo_node)
    assert done.returncode == 0, done.stdout
    return str(done.stdout).strip()


def names(tree: dict[str, str]) -> set[str]:
    return {name for name in tree if "__pycache__" not in name}


def test_install_again_mend_upgrade_and_remove_without_a_compiler_or_an_index(
    bare_home: Any, small_wheelhouse: Any, maker: ModuleType, tmp_path: Path
) -> None:
    before = bare_home.tree()
    wheelhouse = small_wheelhouse("1.0", SAYS.format("1.0"))
    bare_home.install("--from", wheelhouse)
    assert said(bare_home) == "usage: echo-node 1.0"
    assert bare_home.echo_node.readlink() == bare_home.root / SWARM / "current" / "bin" / "echo-node"

    installed, first = bare_home.tree(), versions(bare_home)
    assert "This version is already installed" in bare_home.try_to_install("--from", wheelhouse).stdout
    assert names(bare_home.tree()) == names(installed)

    next((bare_home.root / SWARM).rglob("echo_node/main.py")).write_text("raise SystemExit('half of it is gone')")
    bare_home.install("--from", wheelhouse)
    assert said(bare_home) == "usage: echo-node 1.0"

    archive = tmp_path / "echo-swarm-2.0-some-where.tar"
    maker.archive(small_wheelhouse("2.0", SAYS.format("2.0")), archive)
    bare_home.install("--from", archive)
    assert said(bare_home) == "usage: echo-node 2.0"
    assert len(versions(bare_home)) == 1 and versions(bare_home) != first

    done = bare_home.run(bare_home.root / SWARM / "current" / "installers" / "linux" / "uninstall.sh")
    assert done.returncode == 0, done.stdout
    assert bare_home.tree() == before


def test_a_first_version_that_does_not_start_leaves_nothing_and_no_temporary_file(
    bare_home: Any, small_wheelhouse: Any, maker: ModuleType, tmp_path: Path
) -> None:
    archive, scratch = tmp_path / "echo-swarm-1.0-some-where.tar", tmp_path / "scratch"
    maker.archive(small_wheelhouse("1.0", DIES), archive)
    scratch.mkdir()
    before = bare_home.tree()
    script = bare_home.checkout / "installers" / "linux" / "install.sh"
    done = bare_home.run("env", f"TMPDIR={scratch}", script, "--from", archive)
    assert done.returncode == 1 and "does not start on this machine." in done.stdout
    assert bare_home.tree() == before
    assert list(scratch.iterdir()) == []


def test_a_version_that_does_not_start_is_replaced_by_the_previous_one(bare_home: Any, small_wheelhouse: Any) -> None:
    bare_home.install("--from", small_wheelhouse("1.0", SAYS.format("1.0")))
    before, first = bare_home.tree(), versions(bare_home)
    done = bare_home.try_to_install("--from", small_wheelhouse("2.0", DIES))
    assert done.returncode == 1
    assert "no such processor" in done.stdout
    assert "does not start on this machine; the previous version stays in use." in done.stdout
    assert said(bare_home) == "usage: echo-node 1.0"
    assert names(bare_home.tree()) == names(before)

    (bare_home.root / SERVICE).parent.mkdir(parents=True)
    (bare_home.root / SERVICE).write_text("[Service]")
    no_service = "sys.exit('no service') if 'service' in sys.argv else None"
    done = bare_home.try_to_install("--from", small_wheelhouse("3.0", no_service))
    assert done.returncode == 1
    assert "does not start as a service. The previous version was restored." in done.stdout
    assert "usage: echo-node 1.0 service install" in done.stdout
    assert said(bare_home) == "usage: echo-node 1.0"
    assert versions(bare_home) == first

    done = bare_home.try_to_install("--from", small_wheelhouse("4.0", SAYS.format("4.0")))
    assert done.returncode == 0 and "usage: echo-node 4.0 service install" in done.stdout
    assert said(bare_home) == "usage: echo-node 4.0"


def test_a_running_node_keeps_its_hub_and_the_output_explains_how_to_join_another(
    bare_home: Any, small_wheelhouse: Any
) -> None:
    options = ("--from", small_wheelhouse("1.0", RUNS), "--join", "https://new.example", "--token", "secret")
    for has_service in (False, False, True):  # In the second and third call, the version is already installed.
        if has_service:
            (bare_home.root / SERVICE).parent.mkdir(parents=True)
            (bare_home.root / SERVICE).write_text("[Service]")
        done = bare_home.try_to_install(*options)
        assert done.returncode == 0, done.stdout
        assert "A node is already running on this machine. It still works for https://old.example." in done.stdout
        assert "The node has not joined https://new.example." in done.stdout
        assert "only: echo-node join https://new.example --token secret\n" in done.stdout
        assert "turns: echo-node join https://new.example --token secret --share 1\n" in done.stdout
        assert ("in the background: echo-node service install" in done.stdout) == has_service
        assert "usage: echo-node join" not in done.stdout, "nothing is joined"


def test_a_node_that_works_for_this_hub_continues(bare_home: Any, small_wheelhouse: Any) -> None:
    wheelhouse = small_wheelhouse("1.0", RUNS)
    for page in ("", "/", "/leaderboard"):
        done = bare_home.try_to_install("--from", wheelhouse, "--join", f"https://old.example{page}")
        assert done.returncode == 0 and "It still works for https://old.example. To see" in done.stdout
        assert "has not joined" not in done.stdout and "service install" not in done.stdout
    done = bare_home.try_to_install("--from", wheelhouse, "--join", "https://old.example/leaderboard", "--service")
    assert done.returncode == 0 and "; when it has stopped: echo-node service install" in done.stdout
    done = bare_home.try_to_install("--from", wheelhouse, "--join", "https://old.example.org")
    assert done.returncode == 0 and "The node has not joined https://old.example.org." in done.stdout


def test_no_shell_completion_is_left(bare_home: Any, small_wheelhouse: Any, tmp_path: Path) -> None:
    """Uninstalling restores the shell's settings file, whatever it contained. For fish, there is a separate file for
    echo-node instead.
    """
    before, kept = bare_home.tree(), tmp_path / "installed"
    bare_home.install("--from", small_wheelhouse("1.0", SAYS.format("1.0")))
    shutil.copytree(bare_home.root, kept, symlinks=True)
    owners = {"fish": (None,), "zsh": (None, "", "# mine\n"), "bash": (None, "", "# mine", "# mine\n\n\nalias a=b\n")}
    for shell, mine in ((shell, mine) for shell, files in owners.items() for mine in files):
        shutil.rmtree(bare_home.root)
        shutil.copytree(kept, bare_home.root, symlinks=True)
        removed_with_completion(bare_home, shell, mine)
        file = bare_home.root / f".{shell}rc"
        if mine is not None:
            assert file.read_text() == mine, "the file is as before"
            file.unlink()
        assert bare_home.tree() == before, (shell, mine)


def removed_with_completion(home: Any, shell: str, mine: str | None) -> None:
    """Let typer add a completion for `shell` to a settings file with content `mine`, then uninstall. For zsh, whose
    file the uninstaller leaves changed, restore the file.
    """
    file = home.root / f".{shell}rc"
    if mine is not None:
        file.write_text(mine)
    complete = home.run(
        *("env", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1"),
        *(Path(sys.executable).with_name("echo-node"), "--install-completion", shell),
    )
    assert complete.returncode == 0, complete.stdout
    written = [path for path in home.root.rglob("*echo-node*") if shell in str(path) or ".zfunc" in str(path)]
    assert len(written) == 1, "typer must write to the uninstaller's known place"
    if mine is not None and shell == "bash":
        file.write_text(f"{file.read_text()}source '{written[0]}2'\n")
    home.uninstall()
    if shell == "zsh" and mine:
        assert file.read_text().startswith(mine), "zsh's changes may serve other programs"
        file.write_text(mine)
    elif shell == "bash" and mine is not None:
        end = "" if mine.endswith("\n") or not mine else "\n"
        assert file.read_text() == f"{mine}{end}source '{written[0]}2'\n"
        file.write_text(mine)
    if mine == "" and shell == "zsh":
        file.touch()


def test_a_damaged_wheel_is_not_installed(bare_home: Any, small_wheelhouse: Any) -> None:
    wheelhouse = small_wheelhouse("1.0")
    wheel = next((wheelhouse / "wheels").glob("echo_swarm-*.whl"))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = bare_home.try_to_install("--from", wheelhouse)
    assert done.returncode == 1 and "is damaged" in done.stdout
    assert bare_home.tree() == {}


def test_a_wheelhouse_for_other_pythons_is_explained(bare_home: Any, small_wheelhouse: Any) -> None:
    wheelhouse = small_wheelhouse("1.0")
    requirements = next(wheelhouse.glob("requirements-*.txt"))
    manifest = wheelhouse / "manifest.json"
    manifest.write_text(manifest.read_text().replace(requirements.name, "requirements-3.99.txt"))
    requirements.rename(wheelhouse / "requirements-3.99.txt")
    done = bare_home.try_to_install("--from", wheelhouse)
    assert done.returncode == 1 and "This wheelhouse is for Python 3.99" in done.stdout
    assert bare_home.tree() == {}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--from", "/no/such/thing"), "/no/such/thing does not exist."),
        (("--from", "http://192.0.2.1/x.tar"), "is not https"),
        (("--from", "/tmp", "--source", "/tmp"), "--from WHEELHOUSE cannot be combined with --source or --extra."),
        (("--source", "/tmp", "--insecure"), "--insecure needs --join URL or --from URL."),
    ],
)
def test_a_wrong_call_is_explained(bare_home: Any, options: tuple[str, ...], complaint: str) -> None:
    done = bare_home.try_to_install(*options)
    assert done.returncode == 1 and complaint in done.stdout
    assert bare_home.tree() == {}


def test_an_archive_keeps_the_execute_bits_of_programs(
    small_wheelhouse: Any, maker: ModuleType, opener: ModuleType, tmp_path: Path
) -> None:
    archive = tmp_path / "echo-swarm-1.0-some-where.tar"
    maker.archive(small_wheelhouse("1.0"), archive)
    opened = opener.open_wheelhouse(str(archive), tmp_path / "opened")
    for path in opened.rglob("*.sh"):
        is_program = path.read_text().startswith("#!")
        assert bool(path.stat().st_mode & stat.S_IXUSR) == is_program, path
    assert os.access(opened / "installers" / "linux" / "install.sh", os.X_OK)
