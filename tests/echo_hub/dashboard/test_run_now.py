from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_hub.dashboard.model import Doing
from echo_hub.dashboard.run_now import MOVING, STALLED_S, STALLED_TIMES, WORDS, remaining_s, run_now, stalled_s


async def test_the_time_to_go_follows_the_recent_pace(source: Any) -> None:
    run, steps = await source.run_view(), await source.steps(25)
    assert remaining_s(run, steps) == pytest.approx(23 * (steps[-1].trained_at - steps[0].trained_at) / 11)
    assert remaining_s(run, steps[:2]) is None
    for doing in Doing:
        assert (remaining_s(replace(run, doing=doing), steps) is None) == (doing not in MOVING)


async def test_a_run_without_a_step_is_stalled_unless_there_is_a_reason(source: Any) -> None:
    run, steps = await source.run_view(), await source.steps(25)
    newest = steps[-1].trained_at
    assert stalled_s(replace(run, as_of=newest + STALLED_S), steps) is None, (
        "steps take seconds, but a wait this short is no stall"
    )
    late = replace(run, as_of=newest + STALLED_S + 1)
    assert stalled_s(late, steps) == pytest.approx(STALLED_S + 1)
    assert (run_now(late, steps).word, run_now(late, steps).tone) == ("stalled", "bad")
    assert remaining_s(late, steps) is None
    assert stalled_s(late, steps[:2]) is None, "the pace is unknown"
    for doing in set(Doing) - set(MOVING):
        assert run_now(replace(late, doing=doing), steps).word == WORDS[doing][0], "that state explains the pause"


async def test_after_one_long_step_another_is_no_stall(source: Any) -> None:
    run, steps = await source.run_view(), list(await source.steps(25))
    slow = [*steps[:-1], replace(steps[-1], trained_at=steps[-2].trained_at + 600.0)]
    waited = replace(run, as_of=slow[-1].trained_at + STALLED_TIMES * 600.0)
    assert stalled_s(waited, slow) is None
    assert stalled_s(replace(waited, as_of=waited.as_of + 1), slow) is not None


async def test_every_moment_has_a_word_and_none_is_running(source: Any) -> None:
    assert set(WORDS) == set(Doing)
    assert not any("running" in word for word, _ in WORDS.values())
    run = await source.run_view()
    for doing in Doing:
        now = run_now(replace(run, doing=doing), await source.steps(25))
        assert now.word == WORDS[doing][0] and "running" not in now.detail
