from __future__ import annotations

import re

import pytest

from echo_hub.views.alarms import alarms
from echo_shared.records.run import StepRecord


def step(**figures: float | None) -> StepRecord:
    return StepRecord(
        step=12,
        planned_at=0.0,
        trained_at=1.0,
        num_groups=64,
        num_rollouts=512,
        num_tokens=2_048,
        mean_reward=0.5,
        staleness_mean=1.0,
        staleness_max=2,
        dropped={},
        figures=figures,
    )


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"held_back": 1.0, "grad_norm": 3.1e5}, "Step 12: 1 updates were skipped.* 3.1e\\+05 is far outside"),
        ({"held_back": 1.0, "grad_norm": None}, "skipped.*is not finite.*Version 12 has the weights from before"),
        ({"groups_left_out": 3.0}, "Step 12: 3 of 64 groups were left out"),
        (
            {"out_of_memory": 2.0, "fitted_tokens": 4_096.0},
            "Step 12: .* too little memory.* restarted .* at most 4096 tokens, as are all from now on.* restart",
        ),
        ({"ratio_max": 2.9e8}, "largest importance ratio of a trained token is 2.9e\\+08"),
        ({"mismatch_kl": 0.5}, "differ by 0.5 nats per token"),
    ],
)
def test_each_alarm(figures: dict[str, float | None], words: str) -> None:
    (text,) = alarms(step(**figures))
    assert re.search(words, text)
    assert re.search(r"Look at|Compare|lower the learning rate|see Trust|restart the hub", text), (
        "the text says what to do"
    )


def test_an_honest_step_has_none() -> None:
    assert alarms(None) == alarms(step()) == ()
    assert alarms(step(held_back=0.0, groups_left_out=0.0, ratio_max=40.0, mismatch_kl=0.01, out_of_memory=0.0)) == ()
