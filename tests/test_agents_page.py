"""Every command of docs/agents.md, run in the page's order, with the real packages.

The packages come from `make agents` and `make doors` instead of an index, and the base models are small. A hub and a
node then train the page's game for a step.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config, render_config
from echo_hub.main import app
from tests.agents import FOLDER, agents_python
from tests.documented import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
BASE = "Qwen/Qwen3-0.6B"
VERSION = "from importlib.metadata import version; print(version({!r}))"


def commands(title: str) -> Iterator[list[str]]:
    """Yield the commands in the code blocks of one section."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for block in re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                yield shlex.split(command)


class Newcomer:
    """Runs the commands of the page in one folder, as a new user would type them."""

    def __init__(self, place: Path, environments: dict[str, Path], base: str) -> None:
        """`environments`: directories of Python environments, by their names on the page."""
        self.place = place
        self.environments = environments
        self.base = base
        self.left: list[list[str]] = []
        """Commands of the page that need a running hub and a node; the test runs them at the end."""

    def type(self, command: list[str], said: str = "") -> str:
        match command:
            case ["python3", "-m", "venv", name]:
                (self.place / name).symlink_to(self.environments[name])
                return ""
            case [pip, "install", "-e", package] if pip.endswith("/bin/pip"):
                assert (self.place / package).is_dir()
                return ""
            case [pip, "install", *packages] if pip.endswith("/bin/pip"):
                for package, found, wanted in (each.partition("==") for each in packages):
                    if found:
                        assert self.run(pip.replace("pip", "python"), "-c", VERSION.format(package)).strip() == wanted
                return ""
            case ["echo-hub", "serve", *_] | ["echo-node", "join", *_]:
                self.left.append(command)
                return ""
            case ["echo-hub", *arguments]:
                given = [self.base if word == BASE else word for word in arguments]
                result = CliRunner().invoke(app, given, input=said)
                assert result.exit_code == 0, (command, result.output, result.exception)
                return result.stdout
        return self.run(*command)

    def run(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.place, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    agents_python()  # Skip the test if `make agents` has not run.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_HUB_TASK__SCORER_PROCESSES", "1")
    return tmp_path


def typed(newcomer: Newcomer, title: str, replies: str) -> dict[str, str]:
    """Run all commands of a section. Return the output of each `try-task` command, by the way of playing."""
    told = {}
    for command in commands(title):
        printed = newcomer.type(command, replies)
        if command[:2] == ["echo-hub", "try-task"]:
            told[command[-2]] = printed
    return told


def test_a_textarena_game_and_an_openenv_server_are_tried_as_the_page_says(place: Path) -> None:
    newcomer = Newcomer(place, {"agents": FOLDER}, "builtin:small")
    told = typed(newcomer, "A TextArena game", "[10]\n[3]\n")
    assert "guess" in told["--replies"].lower() and "turn 2: " in told["--replies"]
    assert "turn 1: " in told["--sample"] and "rewards of the group:" in told["--sample"]
    told = typed(newcomer, "An OpenEnv server", "hello\nagain\n")
    assert re.search(
        r"turn 1: \d+ tokens, earned \+0\.5\n  reply     \| hello\n  observed  \| hello", told["--replies"]
    )
    assert {command[:2] for command in map(tuple, newcomer.left)} == {("echo-hub", "serve"), ("echo-node", "join")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_verifiers_package_is_tried_as_the_page_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_HUB_TRAINING__GROUP_SIZE", "3")  # Fewer episodes: each starts two programs for seconds.
    from tests.verifiers_env import make_demo_environment

    demo = make_demo_environment(place / "made")
    newcomer = Newcomer(place, {"vf": demo.python.parent.parent}, str(demo.base))
    told: dict[str, str] = {}
    for command in commands("A verifiers package"):
        if "/bin/vf-init" in command[0]:
            continue  # Skip this command: the package exists already, written by the same command.
        if "/bin/pip" in command[0]:
            continue  # Skip this installation: the environment contains the packages of `make doors`.
        printed = newcomer.type(command)
        told |= {command[-2]: printed} if command[1] == "try-task" else {}
    assert "How many " in told["--sample"] and "rewards of the group:" in told["--sample"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", ["A TextArena game", "An OpenEnv server"])
async def test_a_hub_and_a_node_train_as_the_page_says(title: str, place: Path, site: Any, until: Any) -> None:
    newcomer = Newcomer(place, {"agents": FOLDER}, "builtin:small")
    newcomer.type(next(commands("A TextArena game")))
    for command in commands(title):
        if command[1] not in ("-m", "try-task"):
            newcomer.type(command)
    run = place / next(words[2] for words in newcomer.left if words[:2] == ["echo-hub", "serve"])
    config = run / "config.toml"
    small = {
        "training": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        "sampling": {"max_tokens": 16},
        "evaluation": {"problems": 2},
        "server": {"port": 0},
        "trust": {"verifier": "off"},
    }
    config.write_text(render_config(load_config(config, small)))
    _, url = await site.hub(run)
    await site.node(url, "volunteer", backend="torch")
    view = await until(url, lambda view: view["state"] == "finished")
    assert view["accounting"]["trained"] >= 2
