from __future__ import annotations

from typing import Any

import pytest

from echo_hub.dashboard.answers import IDLE
from echo_hub.dashboard.bars import (
    accounting_segments,
    learner_time_segments,
    lengths_bars,
    mismatch_bars,
    staleness_bars,
)
from echo_hub.dashboard.model import LengthsView, WorkView
from echo_hub.views.learner_time import REASONS
from echo_shared.records.node import NodeMismatch


async def test_the_segments_cover_the_whole_bar(source: Any) -> None:
    segments = accounting_segments(await source.run_view())
    assert [segment.label for segment in segments] == ["trained", "in flight", "stale", "expired", "duplicate"]
    assert sum(segment.length for segment in segments) == pytest.approx(1000)
    assert segments[-1].start + segments[-1].length == pytest.approx(1000)


async def test_the_learners_time_is_the_whole_bar(source: Any) -> None:
    segments = learner_time_segments((await source.run_view()).capacity)
    assert [segment.kind for segment in segments] == [
        *("trained", "idle-rollouts", "idle-hand_off", "idle-evaluation", "idle-start")
    ]
    assert sum(segment.length for segment in segments) == pytest.approx(1000)
    assert set(IDLE) == set(REASONS)
    assert learner_time_segments(None) == ()


def test_staleness_has_a_bar_for_every_age_up_to_the_largest() -> None:
    bars = staleness_bars(WorkView(groups_by_staleness={0: 5, 3: 10}, steps=2))
    assert [(bar.label, bar.value, bar.length) for bar in bars] == [
        *(("0", 5, 500.0), ("1", 0, 0.0), ("2", 0, 0.0), ("3", 10, 1000.0))
    ]
    assert staleness_bars(WorkView()) == ()


def test_lengths_are_all_on_one_axis() -> None:
    stale = LengthsView(outcome="no_advantage", rollouts=2, mean=80.0, p10=60, p50=80, p90=100, longest=100)
    trained = LengthsView(outcome="trained", rollouts=9, mean=20.0, p10=10, p50=20, p90=30, longest=50)
    first, second = lengths_bars(WorkView(lengths=(trained, stale)))
    assert (first.outcome, first.kind, first.start, first.length, first.middle) == ("trained", "trained", 100, 200, 200)
    assert (second.outcome, second.kind, second.start + second.length) == ("no advantage", "drop-no_advantage", 1000)
    empty = LengthsView(outcome="trained", rollouts=1, mean=0.0, p10=0, p50=0, p90=0, longest=0)
    assert lengths_bars(WorkView(lengths=(empty,)))[0].length == 0
    assert lengths_bars(WorkView()) == ()


def test_mismatch_is_held_against_the_farthest() -> None:
    nodes = [NodeMismatch(node_id="a", kl=0.4, num_tokens=90), NodeMismatch(node_id="b", kl=0.1, num_tokens=80)]
    assert [(bar.name, bar.length) for bar in mismatch_bars(nodes, {"a": "Ada"})] == [("Ada", 1000.0), ("", 250.0)]
    none = [NodeMismatch(node_id="a", kl=0.0, num_tokens=90)]
    assert mismatch_bars(none, {})[0].length == 0 and mismatch_bars([], {}) == ()
