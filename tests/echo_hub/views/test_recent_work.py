from __future__ import annotations

import time
from typing import Any

import pytest

from echo_hub.dashboard.model import LengthsView, WorkView
from echo_hub.store.recent_work import IN_FLIGHT, BatchAges, LengthCount
from echo_hub.views import beside, recent_work
from echo_hub.views.recent_work import RecentWorkViews, work_view


def lengths(outcome: str, *tokens: int) -> list[LengthCount]:
    return [LengthCount(outcome=outcome, num_tokens=number, rollouts=1) for number in tokens]


def test_without_work_the_view_is_empty() -> None:
    assert work_view([], []) == WorkView()


def test_each_outcome_has_its_own_lengths() -> None:
    view = work_view(
        [
            *lengths("stale", 9),
            LengthCount(outcome="revoked", num_tokens=7, rollouts=3),
            *lengths("expired", 3, 5),
            *lengths(IN_FLIGHT, 4),
            *lengths("trained", *range(10, 0, -1)),
        ],
        [],
    )
    assert [of.outcome for of in view.lengths] == ["trained", "in flight", "revoked", "expired", "stale"]
    assert view.lengths[0] == LengthsView(outcome="trained", rollouts=10, mean=5.5, p10=1, p50=5, p90=9, longest=10)
    assert (view.lengths[2].rollouts, view.lengths[2].mean) == (3, 7)
    assert view.lengths[4] == LengthsView(outcome="stale", rollouts=1, mean=9, p10=9, p50=9, p90=9, longest=9)


def test_groups_are_counted_by_their_staleness() -> None:
    view = work_view([], [BatchAges(step=4, staleness=(2, 0, 2)), BatchAges(step=3, staleness=(1, 2))])
    assert (list(view.groups_by_staleness.items()), view.steps) == ([(0, 1), (1, 1), (2, 3)], 2)


async def test_the_books_are_read_every_few_seconds_at_most(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    views = RecentWorkViews(hub.driven.store)
    assert views.read() == WorkView()
    await hub.join("a")
    await hub.train_to_the_end()
    assert views.read() == WorkView()
    assert (await hub.pages.run_view()).work.steps == 2, "it has not been read there before"
    monkeypatch.setattr(beside, "QUICK_S", 1e9)
    monkeypatch.setattr(beside, "REST", 0.0)
    later = time.monotonic() + recent_work.READ_EVERY_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    view = views.read()
    assert (view.steps, view.lengths[0].outcome, view.lengths[0].rollouts) == (2, "trained", 8)
    assert sum(view.groups_by_staleness.values()) == 4
