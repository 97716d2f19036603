from __future__ import annotations

import io
import sys
import time

import pytest
from rich.console import Console

from echo_hub.commands import progress_line as progress_line_module
from echo_hub.commands.progress_line import progress_line
from echo_hub.evaluation.work_count import WorkCount


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def count() -> WorkCount:
    begun = WorkCount(doing="Evaluating", units="completions", total=4)
    begun.begin(time.monotonic())
    return begun


def test_a_pipe_gets_a_line_for_each_change(
    count: WorkCount, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_line_module, "PLAIN_S", 0.001)
    said = ""
    with progress_line(count):
        for count.done in (0, 4):
            while f"{count.done} of 4" not in said:
                time.sleep(0.01)
                printed = capsys.readouterr()
                said += printed.err
                assert printed.out == ""
    assert said == "Evaluating: 0 of 4 completions.\nEvaluating: 4 of 4 completions.\n"


def test_short_work_prints_nothing_into_a_pipe(count: WorkCount, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_line(count):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_work_goes_on_without_a_reader_of_stderr(count: WorkCount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line_module, "PLAIN_S", 0.001)
    monkeypatch.setattr(sys, "stderr", Unread())
    with progress_line(count):
        time.sleep(0.05)


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_terminal_gets_one_live_line(count: WorkCount, monkeypatch: pytest.MonkeyPatch, is_beside: bool) -> None:
    """If stdout is a terminal, text on stdout appears above the live line. If stdout is a pipe, the text goes only to
    the pipe."""
    terminal, out = Terminal(), Terminal() if is_beside else io.StringIO()
    monkeypatch.setattr(progress_line_module, "errors", Console(file=terminal, force_terminal=True, width=80))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", out)
    with progress_line(count):
        for done in (0, 4):
            count.done = done
            while f"Evaluating: {done} of 4 completions." not in terminal.getvalue():
                time.sleep(0.01)
        print("Epoch 1")
    shown = terminal.getvalue()
    assert shown.endswith("\x1b[1A\x1b[2K"), "the line disappears at the end"
    assert ("Epoch 1" in shown, "Epoch 1" in out.getvalue()) == (is_beside, not is_beside)
