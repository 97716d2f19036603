"""The headline of the benchmark of the Tinker API, and its cheapest case, measured for real."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import doors


def test_the_headline_keeps_both_speeds_of_rl_loop() -> None:
    cases = {
        "rl_loop by nodes": {"rl_loop_steps_per_min": 20.0, "answered": 144},
        "rl_loop by hub": {"rl_loop_steps_per_min_hub": 30.0},
        "kills": {"kills": 20, "requests_lost": 1, "applied_twice": 2, "rounds_changed": 3, "requests": 500},
    }
    assert doors.headline(cases) == {
        "rl_loop_steps_per_min": 20.0,
        "rl_loop_steps_per_min_hub": 30.0,
        "kills": 20,
        "requests_lost": 1,
        "applied_twice": 2,
        "rounds_changed": 3,
    }
    assert doors.headline({}) == {}


def test_gradients_of_all_losses_equal_plain_torch() -> None:
    found = asyncio.run(doors.losses(seed=1))
    assert found["gradient_difference"] < 1e-5 and len(found) == 7
    assert found["gradient_difference"] == pytest.approx(max(found[name] for name in found))
