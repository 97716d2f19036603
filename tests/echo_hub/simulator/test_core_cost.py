"""Costs of the coordinator: the time of each event by the given clock, and memory with every object counted once."""

from __future__ import annotations

import sys

from echo_hub.core.accounting.events import NodeConnected, Tick
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.simulator.core_cost import MeteredCore, held_bytes


def test_time_by_kind_and_the_worst() -> None:
    settings = CoordinatorSettings(mode="async", steps=1, groups_per_step=1, group_size=2, deadline_s=1.0)
    clock = iter([1.0, 3.0, 10.0, 15.0, 20.0, 21.0])
    metered = MeteredCore(Coordinator(settings, CoordinatorSnapshot()), lambda: next(clock))
    metered.start(0.0)
    for now, event in enumerate((Tick(), NodeConnected(node_id="node"), Tick())):
        metered.handle(event, float(now))
    assert metered.tick_at > 2.0, "the coordinator was told the time at 2"
    cost = metered.cost
    assert (cost.events, cost.seconds, cost.worst) == (3, 8.0, (5.0, "NodeConnected"))
    assert (cost.kinds["Tick"].count, cost.kinds["Tick"].seconds, cost.kinds["Tick"].worst_s) == (2, 3.0, 2.0)


def test_memory_counts_each_object_once_and_no_classes() -> None:
    text = "x" * 1_000
    assert held_bytes([text, text]) == sys.getsizeof([text, text]) + sys.getsizeof(text)
    assert held_bytes([Coordinator]) == sys.getsizeof([Coordinator])
