"""If a part of the GPU benchmark fails in any way, only its own row is affected. Parts are forked from the server
process, or started alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import running
from benchmarks.gpu.running import CAN_FORK, Budget, Server, run_alone

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, Server() as started:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(running, "MODULE", "tests.benchmarks.gpu.odd_part")
        yield started


@pytest.mark.skipif(not CAN_FORK, reason="forks")
def test_a_failing_part_affects_only_its_own_row(server: Server) -> None:
    first = server.run("fine", "tiny", 7, limit_s=30.0)
    assert (first["shape"], first["seed"], first["limit_s"]) == ("tiny", 7, 30.0)
    assert server.run("raises", "tiny", 0, limit_s=30.0) == {"error": "ValueError: no memory"}
    assert "ended with status 9" in server.run("dies", "tiny", 0, limit_s=30.0)["error"]
    began_at = time.monotonic()
    assert server.run("hangs", "tiny", 0, limit_s=0.3) == {"error": "took more than 0 s"}
    assert time.monotonic() - began_at < 20
    assert server.run("fine", "tiny", 0, limit_s=30.0)["parent"] == first["parent"], "libraries are imported once"
    assert len(psutil.Process(first["parent"]).children()) == 0, "the hanging part is gone"


@pytest.mark.skipif(not CAN_FORK, reason="forks")
def test_a_dead_server_is_an_error_and_the_next_server_starts(server: Server) -> None:
    parent = server.run("fine", "tiny", 0, limit_s=30.0)["parent"]
    psutil.Process(parent).kill()
    answers = [server.run("fine", "tiny", 0, limit_s=30.0) for _ in range(2)]
    assert answers[-1]["shape"] == "tiny" and answers[-1]["parent"] != parent


@pytest.mark.skipif(not CAN_FORK, reason="forks")
def test_a_part_for_which_cuda_works_in_no_fork_runs_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"tokens_per_s": 1.0}
    monkeypatch.setattr(running, "run_alone", lambda *_, **__: alone)
    monkeypatch.setattr(running, "_line", lambda *_: '{"error": "Cannot re-initialize CUDA in forked subprocess"}')
    assert server.run("fine", "tiny", 0, limit_s=30.0) == alone


def test_a_part_alone_returns_its_figures_or_the_reason_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def of_child(code: str, limit_s: float) -> dict[str, object]:
        monkeypatch.setattr(subprocess, "run", lambda _, **options: real([sys.executable, "-S", "-c", code], **options))
        return run_alone("learner", "tiny", 0, limit_s=limit_s)

    assert of_child("print('words'); print('{\"a\": 1}')", 60) == {"a": 1}
    failed = of_child("raise ValueError('no memory')", 60)
    assert failed == {"error": "ended with status 1, and its last line is no figures: "}
    assert of_child("import threading; threading.Event().wait()", 0.3) == {"error": "took more than 0 s"}


def test_a_budget_reports_used_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.monotonic()
    budget = Budget("learner, tiny", 60.0)
    monkeypatch.setattr(time, "monotonic", lambda: now + 12)
    assert 47 < budget.left_s <= 48.1
    budget.say("step 1 of 3")
    assert capsys.readouterr().err == "  learner, tiny, 12 of 60 s: step 1 of 3\n"
