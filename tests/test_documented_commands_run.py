"""Every command in a code block of the documentation is run: here, block by block and in order, or by another test.

Here, the hub's commands work on runs with handwritten records, and the node's commands run in an empty home directory
without a hub. `ELSEWHERE` names the tests of commands that need a server, a node, a download or a wait.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app as hub
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_node.main import app as node
from tests.documented import PAGES, ROOT, Command, blocks
from tests.echo_hub.written_books import write_books

ELSEWHERE = {
    r"make ": ".ci/run",
    r"echo-(hub|node)$": "tests/test_containerfile.py",
    r"echo-hub init .*--base": "tests/echo_hub/test_main.py",
    r"echo-hub serve (?!.*--dry-run)": "tests/conftest.py",
    r"echo-hub eval ": "tests/end_to_end/test_demo.py",
    r"echo-hub sft ": "tests/echo_hub/commands/test_sft_command.py",
    r"echo-hub undo ": "tests/echo_hub/commands/test_action_commands.py",
    r"echo-hub (pardon|unban) ": "tests/echo_hub/test_main.py",
    r"echo-hub log .*--follow": "tests/echo_hub/commands/test_log_commands.py",
    r"echo-hub alert-test ": "tests/echo_hub/commands/test_log_commands.py",
    r"echo-hub credit ": "tests/echo_hub/commands/test_credit_commands.py",
    r"echo-hub learner ": "tests/echo_hub/learner/test_launch.py",
    r"echo-hub (bundle|check-bundle) ": "tests/echo_hub/commands/test_bundle_commands.py",
    r"echo-hub export .*--merged": "tests/echo_hub/lifecycle/test_merging.py",
    r"echo-hub export .*--gguf": "tests/echo_hub/lifecycle/gguf/test_export.py",
    r"echo-hub push ": "tests/echo_hub/lifecycle/test_pushing.py",
    r"echo-hub chat ": "tests/echo_hub/commands/test_chat_command.py",
    r"echo-hub try-task .*--base Qwen": "tests/echo_hub/commands/test_try_task_command.py",
    r"echo-hub try-task .*--sample": "tests/echo_hub/commands/test_try_task_command.py",
    r"echo-hub try-task --config (game|tools|reason)/": "tests/test_agents_page.py",
    r"echo-node join ": "tests/conftest.py",
    r"echo-node (run|page|status|leave|finish|doctor|bench|hubs share)\b": "tests/echo_node/test_main.py",
    r"echo-node lend": "tests/echo_node/test_lend.py",
    r"echo-node service ": "tests/echo_node/host/test_service.py",
    r"echo-node team ": "tests/echo_node/commands/test_team.py",
    r"echo-node fleet\b": "tests/echo_node/commands/test_fleet.py",
    r"echo-node config set devices ": "tests/echo_node/host/test_devices.py",
    r"echo-node receipts\b": "tests/echo_node/commands/test_receipts.py",
}
"""Pattern of a command that this file does not run -> the test that runs the command."""
PASSWORD = "correct horse battery"
PLACEHOLDERS = {"NODE...": "fast0", "/var/lib/echo-hub/run": "run"}
"""Words in documented commands, and their replacements, so that all written files stay in the test's own folder."""
SHOWN = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block
]


def elsewhere(command: Command) -> str | None:
    return next((test for shown, test in ELSEWHERE.items() if re.match(shown, str(command))), None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make trained runs with the names that the documentation uses."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("RUN", "OTHER_RUN", "run1", "run2", "sums-run"):
        directory = RunDirectory(folder / name)
        make_run(directory, load_config(None, {"run": {"name": name}}))
        store = Store.open(directory.database_url)
        write_books(store)
        store.close()
        for version in range(1, 7):
            directory.adapter(version).mkdir(parents=True)
            (directory.adapter(version) / "adapter_model.safetensors").write_bytes(bytes(8))
            (directory.adapter(version) / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def workplace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "here"
    shutil.copytree(made, place)
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("block", SHOWN)
def test_the_commands_of_each_block_work(block: list[Command], workplace: Path) -> None:
    for command in block:
        if elsewhere(command) is None:
            status, said, errors = run(command, workplace)
            assert status == 0, f"{command}\n{said}\n{errors}"
            if command.output is not None:
                assert said
                (workplace / command.output).write_text(said, encoding="utf-8")


def run(command: Command, place: Path) -> tuple[int, str, str]:
    """Return status, standard output and standard error of the command."""
    arguments = [PLACEHOLDERS.get(word, word) for word in command.arguments]
    if arguments[0] == "act" and len(arguments) > 2:
        arguments += ["--wait", "0"]  # There is no hub to wait for.
    assert not any(Path(word).is_absolute() for word in arguments)
    # RUN of `init RUN` or `restore FILE RUN` must not exist, but an earlier command may have made it.
    if arguments[0] in ("init", "restore"):
        shutil.rmtree(arguments[1 if arguments[0] == "init" else 2], ignore_errors=True)
    if command.environment or command.program == "pytest":
        own = {**command.environment, "PYTHONPATH": os.pathsep.join([*sys.path, str(place)])}
        for name, value in command.environment.items():
            own[name] = f"{own[name]}{os.pathsep}{value}" if name == "PYTHONPATH" else value
        module = command.program.replace("-", "_")
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, **own},
            check=False,
        )
        return done.returncode, done.stdout, done.stderr
    result = CliRunner().invoke(
        {"echo-hub": hub, "echo-node": node}[command.program], arguments, input=f"{PASSWORD}\n" * 2
    )
    return result.exit_code, result.stdout, f"{result.stderr}{result.exception or ''}"


def test_commands_listed_for_other_tests_are_documented_and_run_there() -> None:
    shown = [command for case in SHOWN for command in case.values[0]]
    for pattern, test in ELSEWHERE.items():
        assert any(re.match(pattern, str(command)) for command in shown), f"no page shows {pattern}"
        assert (ROOT / test).is_file()
    assert sum(elsewhere(command) is None for command in shown) > 50
