"""Every file that the Containerfile copies exists, and its commands work. No image is built."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import echo_hub.main
import echo_node.main
from echo_hub.config.serving_sections import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "Containerfile"
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
APPS = {"echo-hub": echo_hub.main.app, "echo-node": echo_node.main.app}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage of the Containerfile, with their arguments. The argument of FROM is the
    stage on which the stage is based.
    """
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            found[name] = [(word, parent)]
        elif found:
            found[name].append((word, rest.strip()))
    return found


STAGES = stages()


def arguments(stage: str, instruction: str) -> list[str]:
    return [rest for word, rest in STAGES[stage] if word == instruction]


def commands(stage: str) -> list[list[str]]:
    return [shlex.split(command) for line in arguments(stage, "RUN") for command in line.split("&&")]


def test_there_are_two_targets_with_the_expected_stages() -> None:
    assert list(STAGES) == ["source", "made-node", "made-hub", "node", "hub"]
    for name, instructions in STAGES.items():
        assert instructions[0][1] in ("${BASE}", *list(STAGES)[: list(STAGES).index(name)])


def test_every_copied_path_exists_and_is_not_ignored() -> None:
    ignored, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored == "*"
    copied = [name for stage in STAGES for line in arguments(stage, "COPY") for name in line.split()[:-1]]
    local = {name for name in copied if not name.startswith(("--from=", "/"))}
    assert len(local) == 9
    assert {name for name in local if not (ROOT / name).exists()} == set()
    assert {line.removeprefix("!") for line in kept if line.startswith("!")} == local
    for stage in STAGES:
        for line in arguments(stage, "COPY"):
            if line.startswith("--from="):
                parent, source, target = line.removeprefix("--from=").split()
                assert source == target, "an environment works only at its original path"
                assert ["python", "-m", "venv", "--without-pip", source] in commands(parent)


@pytest.mark.parametrize("kind", ["node", "hub"])
def test_the_wheelhouse_is_made_with_existing_options(kind: str) -> None:
    (making,) = [command for command in commands(f"made-{kind}") if command[1] == "scripts/make_wheelhouse.py"]
    helped = subprocess.run(
        [sys.executable, ROOT / making[1], "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    options = dict(zip(making[2::2], making[3::2], strict=True))
    assert {option for option in options if f"{option} " not in helped} == set()
    (base,) = re.findall(r"^ARG BASE=python:(3\.\d+)-slim", FILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert options["--pythons"] == base
    assert options["--extra"] == {"node": "cpu", "hub": "hub"}[kind]
    (installing,) = [command for command in commands(f"made-{kind}") if "--require-hashes" in command]
    assert installing[-1] == f"{options['--out']}/wheelhouse/requirements-{base}.txt"
    assert installing[installing.index("--find-links") + 1] == f"{options['--out']}/wheelhouse/wheels"
    assert "--no-index" in installing


@pytest.mark.skipif(sys.platform == "win32", reason="pip calls environments otherwise there")
def test_pip_installs_into_the_environment_with_the_given_options(tmp_path: Path) -> None:
    (installing,) = [command for command in commands("made-hub") if "--require-hashes" in command]
    wheels, place = tmp_path / "wheels", tmp_path / "place"
    wheels.mkdir()
    (requirements := tmp_path / "requirements.txt").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=120)
    replaced = {
        "python": sys.executable,
        "/opt/echo-hub/bin/python": str(place / "bin" / "python"),
        "/made/wheelhouse/wheels": str(wheels),
        installing[-1]: str(requirements),
    }
    command = [replaced.get(word, word) for word in installing]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    requirements.write_text("no-such-package==1 --hash=sha256:" + "0" * 64)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "no-such-package" in done.stderr


@pytest.mark.parametrize("kind", ["node", "hub"])
def test_a_container_runs_a_real_command_as_its_own_user(kind: str) -> None:
    assert STAGES[kind][0] == ("FROM", "${BASE}")
    (user,), (volume,) = arguments(kind, "USER"), arguments(kind, "VOLUME")
    (made,) = [command for command in commands(kind) if command[0] == "useradd"]
    assert made[made.index("--uid") + 1] == user and int(user) > 0
    assert json.loads(volume) == [made[made.index("--home-dir") + 1]] == arguments(kind, "WORKDIR")
    (program,) = json.loads(arguments(kind, "ENTRYPOINT")[0])
    assert program == f"/opt/echo-{kind}/bin/echo-{kind}" and f"echo-{kind}" in SCRIPTS
    verb, *rest = json.loads(arguments(kind, "CMD")[0])
    command = typer.main.get_command(APPS[f"echo-{kind}"]).commands[verb]  # type: ignore[attr-defined]
    context = command.make_context(verb, rest)
    if kind == "hub":
        assert context.params["run_directory"] == Path("run") and context.params["host"] == "0.0.0.0"
        assert arguments(kind, "EXPOSE") == [str(ServerConfig().port)]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint here")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", FILE], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
