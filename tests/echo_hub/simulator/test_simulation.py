"""Whole simulations, from a scenario to its figures. A simulation must leave the garbage collector as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.simulation import simulate


def test_the_clock_measures_the_coordinator_alone(
    scenario_of: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances one second at each reading. If each event is timed alone, it takes exactly one second."""
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    seconds = count()
    report = simulate(scenario_of(), lambda: float(next(seconds)))
    assert report.finished and report.balanced
    assert (report.core.events_per_s, report.core.worst_event_ms) == (1.0, 1000.0)
    assert report.core.ms_by_kind == {name: 1000 * count for name, count in report.core.events_by_kind.items()}
    assert sum(report.core.events_by_kind.values()) == report.core.events
    assert calls == ["freeze", "unfreeze"]
