"""Knowledge of lengths and fresh tokens help if the pool is too small."""

from __future__ import annotations

import pytest

from benchmarks.simulate import interrupting, speed_up
from benchmarks.simulate.cases import margin_of
from benchmarks.simulate.interrupting import InterruptCase
from benchmarks.simulate.speed_up import CASES, SpeedUpCase, Unaware, seconds_per_step
from echo_hub.core.coordinator import Coordinator
from echo_hub.simulator.world import World


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sampling_is_the_bottleneck(case: SpeedUpCase) -> None:
    assert margin_of(case.scenario(1)) == pytest.approx(speed_up.MARGIN, rel=1e-3)


def test_a_dispatch_has_no_speed_up_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_up, "STEPS", 5)
    monkeypatch.setattr(speed_up, "WARM_UP_STEPS", 2)
    monkeypatch.setattr(speed_up, "DISPATCHES", dict.fromkeys(speed_up.DISPATCHES, Coordinator))
    row = SpeedUpCase(sigma=0.5, max_staleness=1).row(0)
    assert (row["speed_up"], row["speed_up_spread"], row["speed_up_lengths"]) == (1.0, 1.0, 1.0)


def test_interrupted_tokens_are_younger_and_no_rollout_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupting, "STEPS", 12)
    monkeypatch.setattr(interrupting, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(interrupting, "SEEDS", 1)
    row = InterruptCase(max_staleness=4).row(0)
    assert row["token_staleness"] < row["token_staleness_finish"] and row["mixed_share"] > 0


@pytest.mark.slow
def test_knowledge_of_lengths_ends_steps_sooner() -> None:
    seconds = {Unaware: 0.0, Coordinator: 0.0}
    for seed in range(3):
        for make in seconds:
            world = World(SpeedUpCase(sigma=1.0, max_staleness=2).scenario(seed), make=make)
            world.run()
            seconds[make] += seconds_per_step(world)
    assert seconds[Unaware] / seconds[Coordinator] >= 1.1
