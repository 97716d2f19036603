"""Code is tried in a separate process; if that process dies, its death is reported."""

from __future__ import annotations

import os

import pytest

from echo_node.host.probing import failure_of


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", None),
        ("raise SystemExit(3)", "exit status 3"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        pytest.param(
            "import os; os.kill(os.getpid(), 11)",
            "killed by signal 11",
            marks=pytest.mark.skipif(os.name == "nt", reason="POSIX signals"),
        ),
    ],
)
def test_a_library_that_fails_or_crashes_is_a_finding(code: str, words: str | None) -> None:
    said = failure_of(code)
    assert said == words if words is None else words in (said or "")


def test_code_that_hangs_is_given_up() -> None:
    assert failure_of("import threading; threading.Event().wait()", within_s=0.2) == "no answer within 0 s"


def test_variables_are_added_to_those_of_this_process() -> None:
    code = "import os; assert os.environ['ECHO_TEST'] and os.environ['PATH']"
    assert failure_of(code, env={"ECHO_TEST": "1"}) is None
