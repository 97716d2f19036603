from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_node.main import app

FIRST = "2026-01-02 03:04:05,678 Engine: llama_cpp on cpu."
SECOND = "2026-01-02 03:04:06,000 went wrong"


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs" / "node.log"


def test_the_last_lines_are_printed(path: Path) -> None:
    path.write_text(f"{FIRST}\n{SECOND}\nTraceback\n")
    assert CliRunner().invoke(app, ["log"]).stdout == path.read_text()
    assert CliRunner().invoke(app, ["log", "--lines", "1"]).stdout == "Traceback\n"
    lines = CliRunner().invoke(app, ["log", "--json"]).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"at": "2026-01-02 03:04:05,678", "text": "Engine: llama_cpp on cpu."},
        {"at": "2026-01-02 03:04:06,000", "text": "went wrong"},
        {"at": None, "text": "Traceback"},
    ]


def test_without_a_log_the_command_reports_it() -> None:
    found = CliRunner().invoke(app, ["log"])
    assert (found.exit_code, found.stdout) == (0, "") and "No node has written a log here" in found.stderr


def test_following_continues_in_the_next_file(path: Path) -> None:
    path.write_text(f"{FIRST}\n")
    command = [sys.executable, "-u", "-m", "echo_node", "log", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"{FIRST}\n"
            with path.open("a") as file:
                file.write(f"{SECOND}\n")
            assert process.stdout.readline() == f"{SECOND}\n"
            path.rename(path.with_name("node.log.1"))
            path.write_text("2026-01-02 03:04:07,000 after\n")
            assert process.stdout.readline() == "2026-01-02 03:04:07,000 after\n"
        finally:
            process.kill()
