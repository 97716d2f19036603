from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from echo_hub.dashboard import curves
from echo_hub.dashboard.curves import MOST_POINTS, Curves, Trend
from echo_shared.records.run import StepRecord


def step(number: int, **figures: float | None) -> StepRecord:
    return StepRecord(
        step=number,
        planned_at=99.0 + 2 * number,
        num_groups=2,
        trained_at=100.0 + 2 * number,
        num_rollouts=10,
        num_tokens=50,
        mean_reward=float(number),
        staleness_mean=1.0,
        staleness_max=number % 4,
        figures=figures,
    )


async def get(hub: ClientSession, query: str, status: int = 200) -> Any:
    async with hub.get(f"/api/v1/curves{query}") as response:
        assert response.status == status
        return await response.json()


def test_few_steps_are_a_point_each() -> None:
    made = Curves()
    assert (made.after(0), made.last_step) == ([], 0)
    for number in (1, 2, 3):
        made.add(step(number, loss=0.25 if number > 1 else None))
    first, second, third = made.after(0)
    assert (made.width, made.last_step) == (1, 3)
    assert [point["step"] for point in (first, second, third)] == [1, 2, 3]
    assert (first["rollouts_per_s"], second["rollouts_per_s"]) == (None, 5.0)
    assert (first["loss"], second["loss"], first["ratio_max"]) == (None, 0.25, None)
    assert made.after(2) == [third]


@pytest.mark.parametrize("steps", [9, 100, 1_000])
def test_many_steps_are_means_of_equal_stretches(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(curves, "MOST_POINTS", 8)
    made = Curves()
    for number in range(1, steps + 1):
        made.add(step(number, grad_norm=1.0 if number % 2 else None))
        assert len(made.after(0)) <= 8
    points = made.after(0)
    ends = [point["step"] for point in points]
    assert ends == [*range(made.width, steps, made.width), steps]
    assert made.width == 2 ** (made.width.bit_length() - 1) and len(points) > 8 // 2
    for start, point in zip([0, *ends], points, strict=False):
        stretch = range(start + 1, int(point["step"] or 0) + 1)
        assert point["mean_reward"] == pytest.approx(sum(stretch) / len(stretch))
        assert point["staleness_max"] == max(number % 4 for number in stretch)
        assert point["rollouts_per_s"] == pytest.approx(5.0), "the run's first step has no known duration"
        assert point["grad_norm"] in (1.0, None)


def test_the_reward_is_smoothed_by_step_for_every_point_width(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = np.random.default_rng(0).random(40)

    def drawn(most: int) -> dict[float | None, tuple[float | None, float | None]]:
        monkeypatch.setattr(curves, "MOST_POINTS", most)
        made = Curves()
        for number, reward in enumerate(rewards.tolist(), start=1):
            made.add(replace(step(number), mean_reward=reward))
        return {point["step"]: (point["reward_smooth"], point["reward_spread"]) for point in made.after(0)}

    fine, coarse = drawn(600), drawn(8)
    assert len(fine) == 40 and len(coarse) <= 8 and coarse.items() <= fine.items()
    assert fine[1] == (pytest.approx(rewards[0], rel=1e-5), 0.0)
    for number in (2, 7, 40):
        weights = np.exp(-np.arange(number)[::-1] / curves.SMOOTHED_OVER)
        mean = np.average(rewards[:number], weights=weights)
        spread = np.average((rewards[:number] - mean) ** 2, weights=weights) ** 0.5
        assert fine[number] == pytest.approx((mean, spread), rel=1e-5)


def trend_of(rewards: Sequence[float]) -> Trend | None:
    made = Curves()
    for number, reward in enumerate(rewards, start=1):
        made.add(replace(step(number), mean_reward=reward))
    return made.trend


def test_a_trend_is_distinguished_from_noise() -> None:
    noise = np.random.default_rng(1).normal(0.5, 0.05, 60)
    ramp = np.linspace(0, 0.6, 60)
    assert trend_of([]) is None
    for rewards, direction in ((noise[:5], ""), (noise, "steady"), (noise + ramp, "rising"), (noise - ramp, "falling")):
        found = trend_of(rewards.tolist())
        assert found is not None and found.direction == direction
    flat = trend_of([0.5] * 30)
    assert flat is not None and (flat.direction, flat.now, flat.steps) == ("steady", 0.5, curves.TREND_OVER)


def test_noise_alone_seldom_looks_like_a_trend() -> None:
    rng = np.random.default_rng(2)
    found = [trend_of(rng.normal(0.5, 0.1, 40).tolist()) for _ in range(300)]
    assert sum(one is not None and one.direction != "steady" for one in found) <= 0.05 * len(found)


async def test_a_viewer_gets_the_points_that_it_lacks(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source)
    news = await get(hub, "")
    assert news["width"] == 1
    assert [point["step"] for point in news["points"]] == list(range(1, 38))
    source.advance(2)
    assert [point["step"] for point in (await get(hub, "?width=1&since=37"))["points"]] == [38, 39]
    assert (await get(hub, "?width=1&since=39"))["points"] == []
    assert len((await get(hub, "?width=4&since=39"))["points"]) == 39, "points of another width are useless"


async def test_a_long_run_costs_no_more_than_a_short_one(open_hub: Any, source: Any) -> None:
    source.total = source.step = 5_000
    hub = await open_hub(source)
    news = await get(hub, "")
    assert MOST_POINTS / 2 <= len(news["points"]) <= MOST_POINTS
    assert news["points"][-1]["step"] == 5_000
    source.total += 1
    source.advance()
    (point,) = (await get(hub, f"?width={news['width']}&since=5000"))["points"]
    assert point["step"] == 5_001


@pytest.mark.parametrize(
    "query", ["?since=-1", "?since=x", "?width=1.5", "?since=" + "9" * 30, "?since=" + "0" * 5_000]
)
async def test_a_wrong_query_is_refused_with_the_valid_form(hub: ClientSession, query: str) -> None:
    assert "must be numbers" in (await get(hub, query, 400))["error"]
