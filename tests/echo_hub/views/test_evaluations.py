from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from echo_hub.dashboard.model import EvaluationView
from echo_hub.store.reports import read_evaluated_versions
from echo_hub.views import evaluations as evaluations_module
from echo_hub.views.evaluations import EVALUATIONS_SHOWN, EvaluationViews, thinned


def test_greedy_and_sampled_are_one_view(hub: Any, make_evaluations: Any) -> None:
    greedy, sampled = make_evaluations(2, 0.75, at=50.0)
    hub.driven.store.record_evaluations([greedy, sampled])
    assert EvaluationViews(hub.driven.store).read()[""] == [
        EvaluationView(greedy=greedy, samples=8, mean_at_k=0.375, mean_at_k_error=0.125, pass_at={8: 1.0}, seconds=4.0)
    ]


def test_greedy_alone_is_a_view_too(hub: Any, make_evaluations: Any) -> None:
    greedy, _ = make_evaluations(2, 0.75)
    hub.driven.store.record_evaluations([greedy])
    assert EvaluationViews(hub.driven.store).read()[""] == [EvaluationView(greedy=greedy, seconds=2.0)]


def test_later_evaluations_are_found_and_known_ones_not_read_again(
    hub: Any, make_evaluations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = hub.driven.store, []
    read = evaluations_module.read_evaluations
    monkeypatch.setattr(
        evaluations_module, "read_evaluations", lambda connection, since: asked.append(since) or read(connection, since)
    )
    views = EvaluationViews(store)
    assert views.read()[""] == []
    store.record_evaluations(make_evaluations(2, 0.5, at=7.0))
    assert [view.greedy.policy_version for view in views.read()[""]] == [2]
    store.record_evaluations(make_evaluations(0, 0.25, at=9.0))
    assert [view.greedy.policy_version for view in views.read()[""]] == [0, 2], "in the order of versions"
    assert asked == [0.0, 0.0, 7.0]


@pytest.mark.parametrize(("number", "most", "shown"), [(0, 3, []), (3, 3, [0, 1, 2]), (4, 3, [0, 2, 3])])
def test_the_first_and_the_newest_stay(number: int, most: int, shown: list[int], make_evaluations: Any) -> None:
    views = [EvaluationView(greedy=make_evaluations(version, 0.5)[0], seconds=1.0) for version in range(number)]
    assert [view.greedy.policy_version for view in thinned(views, most)] == shown


async def test_of_many_evaluations_some_between_are_left_out(hub: Any, make_evaluations: Any) -> None:
    for version in range(3 * EVALUATIONS_SHOWN):
        hub.driven.store.record_evaluations(make_evaluations(version, 0.5, at=1.0 + version)[:1])
    shown = [view.greedy.policy_version for view in (await hub.pages.run_view()).evaluations]
    assert len(shown) <= EVALUATIONS_SHOWN
    assert (shown[0], shown[-1]) == (0, 3 * EVALUATIONS_SHOWN - 1)
    assert max(late - early for early, late in itertools.pairwise(shown)) <= 4


def test_every_set_has_its_own_curve_from_the_first_day(hub: Any, make_evaluations: Any) -> None:
    store = hub.driven.store
    views = EvaluationViews(store, ["easy", "hard"])
    assert views.read() == {"": [], "easy": [], "hard": []}
    mean, _ = make_evaluations(2, 0.5, at=7.0)
    easy = dataclasses.replace(mean, name="easy", accuracy=0.75)
    store.record_evaluations([mean, easy])
    store.record_evaluations([mean, easy])
    assert {name: [view.greedy.accuracy for view in found] for name, found in views.read().items()} == {
        "": [0.5],
        "easy": [0.75],
        "hard": [],
    }
    assert store.read(read_evaluated_versions) == {2}
