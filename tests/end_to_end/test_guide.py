"""Run every code block of docs/guide.md in order on the real model, with settings that take minutes instead of
hours.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documented import ROOT, blocks

GUIDE = ROOT / "docs" / "guide.md"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODULES = {"echo-hub": "echo_hub.main", "echo-node": "echo_node.main"}
TINY = {
    "ECHO_HUB_TRAINING__STEPS": "2",
    "ECHO_HUB_TRAINING__GROUP_SIZE": "4",
    "ECHO_HUB_TRAINING__GROUPS_PER_STEP": "2",
    "ECHO_HUB_SAMPLING__MAX_TOKENS": "16",
    "ECHO_HUB_EVALUATION__PROBLEMS": "4",
    "ECHO_HUB_LEARNER__THREADS": "1",
    "ECHO_HUB_TRUST__VERIFIER": "off",
    "ECHO_NODE_THREADS": "1",
}
COMMANDS = [command for block in blocks(GUIDE) for command in block]


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.skipif(sys.platform == "win32", reason="the guide's blocks are a shell's")
async def test_the_guide_goes_through(
    site: Any, real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for name, value in {**TINY, "ECHO_HUB_SERVER__PORT": port, "ECHO_NODE_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    (shell,) = [block for block in fenced("sh") if "sums.jsonl" in block and "echo-" not in block]
    assert await ran(site, "sh", "-c", shell) == ""
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 361

    said: dict[str, str] = {}
    hub = node = None
    for command in COMMANDS:
        arguments = [
            str(real_model) if word == BASE else word.replace(":8710", f":{port}") for word in command.arguments
        ]
        match command.program, arguments[0]:
            case "echo-hub", "serve":
                hub = await site.start(MODULES["echo-hub"], *arguments)
                await hub.printed("Dashboard")
            case "echo-node", "join":
                node = await site.start(MODULES["echo-node"], *arguments)
                assert hub is not None
                await hub.printed("The pages stay available until you press", within_s=900)
                await node.printed("The run is finished", within_s=60)
                assert (await node.end())[0] == (await hub.end())[0] == 0
            case _:
                program = (sys.executable, "-u", "-m", MODULES[command.program])
                said[arguments[0]] = await ran(site, *program, *arguments)
    assert "135 million weights" in (tmp_path / "sums-run" / "config.toml").read_text()
    assert "completions" in said["try-task"] and "groups of 4 have differing rewards" in said["try-task"]
    assert "base " in said["eval"] and "Version 2 solves " in said["eval"] and "Example of version 2" in said["eval"]
    (tmp_path / "elsewhere").mkdir()
    (use,) = fenced("python")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    answered = await ran(site, sys.executable, "-c", use.replace('"adapter"', '"../adapter"'))
    assert "What is 7 + 12?" in answered and "assistant" in answered


async def ran(site: Any, *command: str) -> str:
    status, text = await (await site.program(*command)).ended()
    assert status == 0, f"{command}\n{text}"
    return str(text)


def test_the_guide_shows_each_part_of_a_run_once() -> None:
    shown = [command.arguments[0] for command in COMMANDS]
    assert shown == ["init", "try-task", "serve", "join", "eval", "export"]
