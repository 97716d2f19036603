"""`echo-hub chat` as an operator types it, with the built-in model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from tests.echo_hub.lifecycle.gguf.test_export import make_run_with_version


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run_with_version(tmp_path_factory.mktemp("chat"), "builtin:tiny", strength=0.5)


def invoke(*arguments: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *map(str, arguments)], input=typed)


def said(*arguments: str | Path, typed: str = "") -> str:
    result = invoke(*arguments, typed=typed)
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    return result.stdout


def test_one_prompt_is_answered_by_a_version_or_the_base(run: RunDirectory) -> None:
    greedy = ("--prompt", "12+34=", "--temperature", "0")
    newest = said(run.root, *greedy)
    assert newest.strip() and said(f"{run.root}@3", *greedy) == newest == said(run.root, "--version", "3", *greedy)
    base = said(f"{run.root}@0", *greedy)
    assert base != newest


def test_several_samples_are_numbered_and_repeat_with_the_seed(run: RunDirectory) -> None:
    given = ("--prompt", "12+34=", "--samples", "3", "--seed", "5", "--temperature", "2", "--max-tokens", "6")
    found = said(run.root, *given)
    assert [line for line in found.splitlines() if line.startswith("---")] == [f"--- {k} of 3" for k in (1, 2, 3)]
    assert said(run.root, *given) == found


def test_the_prompt_may_come_from_a_pipe(run: RunDirectory) -> None:
    greedy = ("--temperature", "0")
    assert said(run.root, "--prompt", "-", *greedy, typed="12+34=") == said(run.root, "--prompt", "12+34=", *greedy)


def test_talking_takes_commands_and_goes_on_after_a_wrong_one(run: RunDirectory) -> None:
    typed = "12+34=\n\n/version 0\n12+34=\n/version 2\n/hello\n/temperature x\n/tokens 1\n/reset\n12+34=\n/help\n"
    result = invoke(run.root, "--temperature", "0", typed=typed)
    assert result.exit_code == 0
    first, second, third = result.stdout.splitlines()
    greedy = ("--prompt", "12+34=", "--temperature", "0")
    assert first == said(run.root, *greedy).strip() and second == said(f"{run.root}@0", *greedy).strip()
    assert len(third) <= 1, "one token"
    assert "version 3" in result.stderr and "with the base model" in result.stderr
    assert result.stderr.count("There is no such command") == 2 and "/temperature T" in result.stderr
    assert "This policy version does not exist" in result.stderr


def test_what_is_unclear_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    for arguments, what in (
        ((f"{run.root}@3", "--version", "0"), "version is not clear"),
        ((f"{run.root}@new",), "version is not clear"),
        ((f"{run.root}@2", "--prompt", "x"), "does not exist"),
        ((run.root, "--samples", "2"), "need one prompt"),
        ((tmp_path / "none",), "not a run directory"),
    ):
        result = invoke(*arguments)
        assert isinstance(result.exception, ConfigError) and what in result.exception.what


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_stops_a_reply_or_discards_a_line_and_ctrl_d_ends(run: RunDirectory) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "echo_hub", "chat", str(run.root), "--max-tokens", "200", "--temperature", "5"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        shown = b""

        def until(part: bytes) -> None:
            nonlocal shown
            while part not in shown:
                shown += os.read(ours, 4_096)
            shown = shown.partition(part)[2]

        until(b"> ")
        os.write(ours, b"12+34=\n")
        until(b"\n")
        os.killpg(process.pid, 2)
        until(b"> ")
        os.write(ours, b"half a li")
        until(b"half a li")
        os.killpg(process.pid, 2)
        until(b"Ctrl-D ends")
        until(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
        os.close(ours)
