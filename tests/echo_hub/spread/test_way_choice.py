from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest

from echo_hub.spread.trees import FAN_OUT, HOP_S
from echo_hub.spread.way_choice import (
    BROADCAST_START_S,
    SWARM_FACTOR,
    SWARM_START_S,
    Circumstances,
    choose_way,
    estimates,
)
from echo_shared.wire.messages import MAX_PIECE_BYTES, Way

MBIT = 1e6 / 8
LINKED = Circumstances(
    payload_bytes=64_000_000,
    piece_bytes=64 * 1024,
    num_nodes=8,
    num_linked=8,
    num_links=56,
    hub_uplink=100 * MBIT,
    node_uplink=40 * MBIT,
)


def at(**changed: Any) -> Circumstances:
    return replace(LINKED, **changed)


def test_the_formulas_by_hand() -> None:
    """8 nodes need 512 MB altogether. In a broadcast, hub and nodes send 100 + 8 * 40 Mbit/s = 52.5 MB/s; the hub alone
    sends 12.5 MB/s.
    """
    seconds = estimates(LINKED)
    assert seconds[Way.INLINE] == pytest.approx(512 / 12.5)
    assert seconds[Way.BROADCAST] == pytest.approx(512 / 52.5 + BROADCAST_START_S)
    assert seconds[Way.SWARM] == pytest.approx(SWARM_FACTOR * 512 / 52.5 + SWARM_START_S)
    slow_hub = estimates(at(hub_uplink=20 * MBIT))
    assert slow_hub[Way.BROADCAST] == pytest.approx(64 / 2.5 + BROADCAST_START_S), "one copy is the least"


def test_a_missing_link_costs_a_copy_from_the_hub() -> None:
    half = estimates(at(num_links=28, hub_uplink=20 * MBIT))
    assert half[Way.BROADCAST] == pytest.approx(64 / 2.5 * (1 + 0.5 * 7) + BROADCAST_START_S)
    few = estimates(at(num_links=2, num_linked=2, hub_uplink=20 * MBIT))
    assert half[Way.BROADCAST] < few[Way.BROADCAST] <= few[Way.INLINE] + BROADCAST_START_S


def test_in_a_large_fleet_only_a_node_without_any_link_costs_a_copy() -> None:
    """Each of 1,024 nodes has 32 links. The hub sends one copy, plus one for each node without a link."""
    at_all = at(num_nodes=1_024, num_linked=1_024, num_links=32 * 1_024, hub_uplink=20 * MBIT, node_uplink=40 * MBIT)
    linked_s = estimates(at_all)[Way.BROADCAST]
    hops_s = log(1_024, FAN_OUT) * (FAN_OUT * 64 * 1_024 / (40 * MBIT) + HOP_S)
    assert linked_s == pytest.approx(64 / 2.5 + hops_s + BROADCAST_START_S)
    lone_s = estimates(replace(at_all, num_linked=1_022))[Way.BROADCAST]
    assert lone_s == pytest.approx(3 * 64 / 2.5 + hops_s + BROADCAST_START_S)
    assert choose_way(at_all) is Way.BROADCAST


@pytest.mark.parametrize(
    ("changed", "way"),
    [
        ({}, Way.BROADCAST),
        ({"payload_bytes": 20_000}, Way.INLINE),
        ({"num_nodes": 1, "num_linked": 0, "num_links": 0}, Way.INLINE),
        ({"num_linked": 0, "num_links": 0}, Way.SWARM),
        ({"num_linked": 0, "num_links": 0, "payload_bytes": 500_000}, Way.INLINE),
        ({"num_nodes": 300, "num_linked": 0, "num_links": 0, "payload_bytes": 500_000}, Way.SWARM),
        ({"piece_bytes": MAX_PIECE_BYTES}, Way.BROADCAST),
        ({"piece_bytes": 2 * MAX_PIECE_BYTES}, Way.SWARM),
        ({"num_nodes": 0, "num_linked": 0, "num_links": 0}, Way.SWARM),
    ],
)
def test_the_choice(changed: dict[str, Any], way: Way) -> None:
    assert choose_way(at(**changed)) is way
