"""Old over new, with equal seeds; the pool is not enough."""

from __future__ import annotations

import pytest

from benchmarks.simulate import speed_up
from benchmarks.simulate.cases import margin_of
from benchmarks.simulate.speed_up import CASES, SpeedUpCase, Unaware, seconds_per_step
from echo_hub.core.coordinator import Coordinator
from echo_hub.simulator.world import World


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sampling_is_what_limits(case: SpeedUpCase) -> None:
    assert margin_of(case.scenario(1)) == pytest.approx(speed_up.MARGIN, rel=1e-3)


def test_a_row_has_each_dispatch_over_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_up, "STEPS", 8)
    monkeypatch.setattr(speed_up, "WARM_UP_STEPS", 3)
    row = SpeedUpCase(sigma=1.0, max_staleness=2).row(0)
    assert row["speed_up"] == pytest.approx(row["baseline_s_per_step"] / row["s_per_step"])
    assert {"speed_up_spread", "speed_up_lengths", "speed_up_apart"} <= row.keys()
    assert 0 < row["tokens_trained"] < 548 and 0 < row["tokens_trained_spread"] < 548
    assert row["details"].keys() == speed_up.DISPATCHES.keys()


def test_a_dispatch_has_no_speed_up_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_up, "STEPS", 5)
    monkeypatch.setattr(speed_up, "WARM_UP_STEPS", 2)
    monkeypatch.setattr(speed_up, "DISPATCHES", dict.fromkeys(speed_up.DISPATCHES, Coordinator))
    row = SpeedUpCase(sigma=0.5, max_staleness=1).row(0)
    assert (row["speed_up"], row["speed_up_spread"], row["speed_up_lengths"]) == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_who_knows_lengths_ends_steps_sooner() -> None:
    """Where it asks whoever comes first for the longest, it gains a twentieth."""
    seconds = {Unaware: 0.0, Coordinator: 0.0}
    for seed in range(3):
        for make in seconds:
            world = World(SpeedUpCase(sigma=1.0, max_staleness=2).scenario(seed), make=make)
            world.run()
            seconds[make] += seconds_per_step(world)
    assert seconds[Unaware] / seconds[Coordinator] >= 1.1


def test_headlines_are_the_least_and_the_most() -> None:
    rows = {case.name: {"speed_up": 1.5 + number} for number, case in enumerate(CASES)}
    assert speed_up.headline(rows) == {"speed_up": 1.5, "speed_up_most": 4.5}
    assert speed_up.headline({}) == {"speed_up": None, "speed_up_most": None}
