from __future__ import annotations

import time

import pytest

from benchmarks.gpu.budget import Budget


def test_it_reports_finished_and_remaining_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.monotonic()
    budget = Budget("learner, tiny", 60.0)
    monkeypatch.setattr(time, "monotonic", lambda: now + 12)
    assert 47 < budget.left_s <= 48.1
    budget.say("step 1 of 3")
    assert capsys.readouterr().err == "  learner, tiny, 12 of 60 s: step 1 of 3\n"
