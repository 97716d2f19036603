"""Every command in the documentation must exist, with its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from benchmarks.__main__ import main as benchmark
from benchmarks.__main__ import names
from echo_hub.main import app as hub
from echo_node.main import app as node
from tests.documented import PAGES, ROOT, Command, blocks, check, mentioned

PARSERS = {"echo-hub": get_command(hub), "echo-node": get_command(node)}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLACEHOLDERS = {"COMMAND"}


def hold(command: Command, *, is_whole: bool) -> None:
    match command.program, command.arguments:
        case _, [word, *_] if word in PLACEHOLDERS:
            pass
        case (("echo-hub" | "echo-node"), arguments):
            check(PARSERS[command.program], arguments, is_whole=is_whole and bool(arguments))
        case "make", arguments:
            targets = {word for word in arguments if "=" not in word}
            assert targets <= TARGETS, f"the Makefile has no {targets - TARGETS}"
        case "python", ["-m", "benchmarks", name, *rest]:
            assert name in {*names(), "NAME"}, f"there is no benchmark {name}"
            measure = typer.Typer()
            measure.command()(benchmark)
            check(get_command(measure), [name, *rest], is_whole=is_whole)
        case "python", ["-m", module, *_] if module.startswith("scripts."):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"there is no {module}"
        case "python", [script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file()
        case "pytest", _:
            pass
        case _:
            raise AssertionError(f"no test knows what this is: {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_given(page: Path) -> None:
    wrong = []
    shown = [(command, True) for block in blocks(page) for command in block]
    for command, is_whole in [*shown, *((command, False) for command in mentioned(page))]:
        try:
            hold(command, is_whole=is_whole)
        except Exception as error:  # noqa: BLE001 - Each is told with its command.
            wrong.append(f"{command}: {error or type(error).__name__}")
    assert wrong == []


def test_commands_are_found_in_all_forms() -> None:
    shown = [command for page in PAGES for block in blocks(page) for command in block]
    assert len(shown) > 90
    assert {command.program for command in shown} >= {"echo-hub", "echo-node", "make", "pytest"}
    texts = {str(command) for command in shown}
    assert "echo-hub init run" in texts and "echo-hub password /var/lib/echo-hub/run" in texts
    assert any(command.environment and command.program == "echo-hub" for command in shown)
    assert any(command.output == "pool.toml" for command in shown)
    assert any(str(command) == "make demo DEMO_ARGS=--keep" for page in PAGES for command in mentioned(page))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["serv", "RUN"], "has no command serv"),
        (["credit", "give"], "has no command give"),
        (["serve", "RUN", "--dry"], "dry"),
        (["serve"], "needs"),
        (["serve", "RUN", "RUN"], "does not take"),
    ],
)
def test_invalid_commands_are_found(arguments: list[str], what: str) -> None:
    with pytest.raises(Exception, match=what):
        check(PARSERS["echo-hub"], arguments, is_whole=True)
