from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu


def test_a_part_that_fails_or_hangs_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def of_child(code: str, limit_s: float) -> dict[str, object]:
        monkeypatch.setattr(
            subprocess, "run", lambda command, **options: real([sys.executable, "-S", "-c", code], **options)
        )
        return gpu.run_part("learner", "tiny", 0, limit_s=limit_s)

    assert of_child("print('words'); print('{\"a\": 1}')", 60) == {"a": 1}
    assert of_child("raise ValueError('no memory')", 60) == {"error": "ended with status 1: ValueError: no memory"}
    assert of_child("import os; os._exit(9)", 60) == {"error": "ended with status 9: it said nothing"}
    assert of_child("import threading; threading.Event().wait()", 0.3) == {"error": "took more than 0 s"}


def test_the_headline_counts_failures() -> None:
    rows = [{"case": "a", "tokens_per_s": 5.0}, {"case": "b", "error": "x"}]
    assert gpu.headline(rows) == {"a: tokens_per_s": 5.0, "failed": 1}
    assert gpu.plan()
