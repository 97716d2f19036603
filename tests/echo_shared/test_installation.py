"""The command that Echo prints for installing an optional part fits each kind of installation, as pip itself
confirms.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echo_shared.installation import how_to_upgrade, shell_line

posix = pytest.mark.skipif(sys.platform == "win32", reason="the command is for PowerShell")

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
FROM_INDEX = re.compile(
    r"pip3? install[^\n`]*?(?<![/.\w-])echo[-_.]swarm(?![\w.-])(?!(\[[^\]\n]*\])? @ )|echo-swarm\[(?![^\]\n]*\] @ )"
)
"""Finds commands that would make pip look for Echo in a package index, which does not have it."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this checkout below a path with a space; builds change only the copy."""
    copy = tmp_path_factory.mktemp("a checkout") / "echo"
    for name in ("hub", "edge_client", "shared"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "assets"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    house = tmp_path_factory.mktemp("wheels")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", house, checkout)
    return next(house.glob("*.whl"))


def pip(*arguments: str | Path) -> str:
    done = subprocess.run(
        [*PIP, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def installed(target: Path, *arguments: str | Path) -> Path:
    """Install into `target` with these arguments of pip, offline and without dependencies; return `target`."""
    pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--target", target, *arguments)
    return target


def said(target: Path, expression: str, *options: str) -> str:
    """Return the value of the expression, evaluated in a process that uses the copy of Echo in `target`."""
    done = subprocess.run(
        [sys.executable, *options, "-c", f"from echo_shared.installation import *; print({expression})"],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=target,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def understood(command: str, tmp_path: Path) -> str:
    """Return what pip would install for the command that Echo printed (`--dry-run`), without Echo's dependencies."""
    arguments = shlex.split(command)
    assert arguments[:4] == [sys.executable, "-m", "pip", "install"]
    assert FROM_INDEX.search(command) is None
    offline = ("--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--target", tmp_path / "nowhere")
    would = pip("install", *offline, *arguments[4:])
    assert "does not provide the extra" not in would
    return would


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("from-wheel"), wheel)


@posix
@pytest.mark.slow
@pytest.mark.parametrize("editable", [True, False])
def test_a_copy_from_a_checkout_is_added_to_from_there(checkout: Path, tmp_path: Path, editable: bool) -> None:
    target = installed(tmp_path / "target", *(["-e"] if editable else []), checkout)
    command = said(target, "how_to_install('cuda')")
    pins = shlex.join(["-c", str(checkout / "constraints.txt")])
    assert f"{pins} {'-e ' if editable else ''}{shlex.quote(f'{checkout}[cuda]')}" in command
    assert "Would install echo-swarm" in understood(command, tmp_path)
    assert "constraints.txt" not in said(target, "how_to_install('vllm')")
    without_extra = command.replace("[cuda]", "")
    assert said(target, "how_to_upgrade()") == f"Update {checkout}, then run: {without_extra}"


@posix
def test_a_copy_made_by_the_installer_is_upgraded_by_the_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    before = how_to_upgrade()
    (tmp_path / "wheelhouse").write_text("0" * 64)
    system = "macos" if sys.platform == "darwin" else "linux"
    assert before != how_to_upgrade()
    assert how_to_upgrade().endswith(f"{tmp_path}/installers/{system}/install.sh --from ARCHIVE")


@posix
@pytest.mark.slow
def test_a_copy_from_a_wheel_is_added_to_from_that_wheel(wheel: Path, from_wheel: Path, tmp_path: Path) -> None:
    command = said(from_wheel, "how_to_install('cuda')")
    assert command.endswith(f" pip install '{wheel}[cuda]'")
    assert "Would install echo-swarm" in understood(command, tmp_path)
    assert wheel.name in said(from_wheel, "how_to_upgrade()")


@posix
@pytest.mark.slow
def test_a_wheel_among_others_is_a_wheelhouse(wheel: Path, from_wheel: Path) -> None:
    other = wheel.with_name("other-1.0-py3-none-any.whl")
    other.touch()
    assert f" --find-links {wheel.parent} '{wheel}[cuda]'" in said(from_wheel, "how_to_install('cuda')")
    other.unlink()


@pytest.mark.slow
def test_a_copy_without_a_known_source_gets_the_extras_packages(wheel: Path, tmp_path: Path) -> None:
    by_name = installed(tmp_path / "by-name", "--find-links", wheel.parent, "echo-swarm")
    gone = Path(shutil.copy2(wheel, tmp_path))
    from_gone = installed(tmp_path / "from-gone", gone)
    gone.unlink()
    for target in (by_name, from_gone):
        command = said(target, "how_to_install('cuda')")
        assert FROM_INDEX.search(command) is None and "echo" not in command.partition(" install ")[2]
        assert re.findall(r"[\w-]+(?=>=)", command) == ["huggingface-hub", "torch", "transformers"]
        assert "'mlx-lm>=0.32; sys_platform != \"win32\"'" in said(target, "how_to_install('mlx')")
        advice = "Reinstall Echo with its extra nonsense, from the source of this copy."
        assert said(target, "how_to_install('nonsense')") == advice
        assert said(target, "how_to_upgrade()").startswith("Install the newer release from the source of this one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noted", "place"),
    [
        ({"url": "https://example.org/e.whl", "archive_info": {}}, "https://example.org/e.whl"),
        (
            {"url": "https://example.org/e.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "x"},
            "git+https://example.org/e.git@abc#subdirectory=x",
        ),
    ],
)
def test_a_copy_from_elsewhere_is_added_to_from_there(
    noted: object, place: str, from_wheel: Path, tmp_path: Path
) -> None:
    target = noting(json.dumps(noted), from_wheel, tmp_path)
    assert f"echo-swarm[cuda] @ {place}" in said(target, "how_to_install('cuda')")
    assert place in said(target, "how_to_upgrade()")


@pytest.mark.slow
@pytest.mark.parametrize("noted", ["", "{", "[]", "{}"])
def test_a_broken_source_record_of_pip_is_tolerated(noted: str, from_wheel: Path, tmp_path: Path) -> None:
    target = noting(noted, from_wheel, tmp_path)
    assert "torch" in said(target, "how_to_install('cuda')")


def noting(text: str, from_wheel: Path, tmp_path: Path) -> Path:
    """Return an installed copy of Echo for which pip has recorded this text as the source."""
    target = Path(shutil.copytree(from_wheel, tmp_path / "target"))
    next(target.glob("*.dist-info/direct_url.json")).write_text(text)
    return target


@posix
def test_a_copy_that_was_never_installed_is_added_to_from_its_checkout(checkout: Path) -> None:
    assert f" -e '{checkout}[cuda]'" in said(checkout / "shared", "how_to_install('cuda')", "-S")


def test_powershell_takes_quoted_paths() -> None:
    line = shell_line([r"C:\A user's\python.exe", "-m", "pip", "install", r"C:\echo[cpu]"], windows=True)
    assert line == r"& 'C:\A user''s\python.exe' -m pip install 'C:\echo[cpu]'"
    assert shell_line([r"C:\python.exe", "-m", "pip"], windows=True) == r"C:\python.exe -m pip"


def texts() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml") or path.name == "Makefile"]
    folders = ("hub", "edge_client", "shared", "benchmarks", "scripts", "installers", "docs", "tests")
    kinds = (".py", ".md", ".sh", ".ps1", ".html", ".toml", ".js", ".txt")
    return top + [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds]


def test_nothing_says_to_install_echo_from_an_index() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts()
        for match in FROM_INDEX.finditer(path.read_text(encoding="utf-8"))
        if path != Path(__file__).resolve()
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install " + "echo-swarm",
        "python -m pip install --upgrade " + "echo-swarm",
        "pip install 'echo-swarm" + "[cuda]'",
        "the extra 'echo-swarm" + "[cuda]'",
    ],
)
def test_commands_that_ask_an_index_for_echo_are_found(text: str) -> None:
    assert FROM_INDEX.search(text) is not None


@pytest.mark.parametrize(
    "text",
    ["pip install 'echo-swarm[cuda] @ https://example.org/e.whl'", "pip install /opt/echo-swarm", "echo-swarm 0.1.0"],
)
def test_others_would_not(text: str) -> None:
    assert FROM_INDEX.search(text) is None
