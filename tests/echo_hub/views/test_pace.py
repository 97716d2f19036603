from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.config.sections import CostConfig
from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.store.recent import Spread
from echo_hub.views import pace as pace_module
from echo_hub.views.pace import (
    TRUSTED,
    behind_versions,
    broadcast_s,
    busy_rate,
    busy_seconds,
    kinds_of,
    newest_steps,
    read_pace,
)
from tests.echo_hub.written_books import write_books


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0.0), ([(1.0, 2.0), (1.5, 3.0)], 2.0), ([(5.0, 6.0), (1.0, 2.0)], 2.0), ([(1.0, 9.0), (2.0, 3.0)], 8.0)],
)
def test_how_long_a_node_had_work(spans: list[tuple[float, float]], seconds: float) -> None:
    assert busy_seconds(spans) == seconds


@pytest.fixture
async def hub(make_hub: Any) -> Any:
    return await make_hub(running=False)


def spread(version: int, *seconds: float, every_s: float = 100.0) -> Spread:
    trained_at = 10.0 + version * every_s
    return Spread(policy_version=version, trained_at=trained_at, published_at=trained_at + 0.5, seconds=seconds)


def test_a_broadcast_counts_from_the_training() -> None:
    assert broadcast_s([]) == 0.0
    assert broadcast_s([spread(1)]) == 0.0
    assert broadcast_s([spread(1, 1.0, 3.0)]) == 3.5
    assert broadcast_s([replace(spread(1, 1.0), trained_at=None)]) == 0.0, "no node waits for the base"
    newest_under_way = [spread(5, 0.1), spread(4, 2.0), spread(3, 9.0), spread(2, 3.0)]
    assert broadcast_s([*newest_under_way, spread(1, 20.0)]) == 3.5, "the oldest and the newest do not count either"
    assert broadcast_s(newest_under_way[2:]) == 3.5


def test_versions_that_have_arrived_nowhere_yet_do_not_hide_how_long_the_others_took() -> None:
    over_a_slow_line = [spread(version) for version in range(12, 5, -1)]
    over_a_slow_line += [spread(5, 2.0), spread(4, 9.0), spread(3, 8.0), spread(2, 10.0), spread(1, 11.0)]
    assert broadcast_s(over_a_slow_line) == 9.5


def test_versions_that_share_a_line_are_measured_one_after_the_other() -> None:
    four_apart = [spread(version, 5.5 + 2 * version, every_s=2.0) for version in range(6, 0, -1)]
    assert broadcast_s(four_apart) == 4.0
    overtaken = [spread(version, 3.5, every_s=2.0) for version in (5, 4, 3, 2, 1)]
    overtaken[3] = spread(2, 9.5, every_s=2.0)
    assert broadcast_s(overtaken) == 0.0, "no node waited for a version that overtook the one before it"


def test_a_kind_is_its_median_node() -> None:
    nodes = [NodeClass(name="a", count=1, rollouts_per_s=rate, latency_s=1.0) for rate in (1.0, 2.0, 30.0)]
    nodes.append(NodeClass(name="b", count=1, rollouts_per_s=5.0, latency_s=2.0))
    assert kinds_of(nodes) == (
        NodeClass(name="a", count=3, rollouts_per_s=2.0, latency_s=1.0),
        NodeClass(name="b", count=1, rollouts_per_s=5.0, latency_s=2.0),
    )


async def test_before_the_first_step_nothing_is_measured(hub: Any) -> None:
    store = hub.driven.store
    assert newest_steps(store) == []
    assert read_pace(store, hub.config, [], None) is None


async def test_the_pace_of_a_run_with_handmade_records(hub: Any) -> None:
    store = hub.driven.store
    write_books(store)
    pace = read_pace(store, hub.config, newest_steps(store), None)
    assert pace is not None
    assert pace.workload == Workload(
        mode="async",
        rollouts_per_step=8,
        train_s=2.0,
        hand_off_s=pytest.approx(0.1),
        broadcast_s=pytest.approx(0.5),
        max_staleness=3,
        publish_every=1,
    )
    fast, slow = pace.kinds
    assert (fast.name, fast.count, fast.rollouts_per_s, fast.latency_s) == ("torch · RTX 4070", 2, 2.0, 1.5)
    assert (slow.name, slow.count, slow.latency_s) == ("llama_cpp · Old laptop", 1, 3.0)
    assert slow.rollouts_per_s == pytest.approx(2 / 3)


async def test_the_nodes_prices_are_their_kinds_cost(hub: Any) -> None:
    store = hub.driven.store
    write_books(store)
    for node_id, cost in (("fast0", 0.4), ("fast1", 0.6)):
        store.node_seen(
            node_id=node_id,
            public_key=b"k",
            name="x",
            backend="torch",
            device="RTX 4070",
            now=1.0,
            cost_per_hour=cost,
            power_watts=100.0,
        )
    config = hub.config.model_copy(update={"cost": CostConfig(spend_cap_per_hour=1.0, electricity_per_kwh=0.5)})
    pace = read_pace(store, config, newest_steps(store), None)
    assert pace is not None
    assert [(kind.count, kind.cost_per_h) for kind in pace.kinds] == [(2, pytest.approx(0.55)), (1, 0.0)]


async def test_of_nodes_that_are_away_nothing_is_expected(hub: Any) -> None:
    store = hub.driven.store
    write_books(store)
    pace = read_pace(store, hub.config, newest_steps(store), {"fast1"})
    assert pace is not None
    assert [(kind.name, kind.count) for kind in pace.kinds] == [("torch · RTX 4070", 1)]


async def test_a_new_node_counts_as_one_of_its_kind(hub: Any) -> None:
    store = hub.driven.store
    write_books(store)
    for node_id, device in (("new", "RTX 4070"), ("strange", "abacus")):
        store.node_seen(node_id=node_id, public_key=b"k", name="x", backend="torch", device=device, now=1.0)
    pace = read_pace(store, hub.config, newest_steps(store), {"fast0", "new", "strange"})
    assert pace is not None
    assert [(kind.name, kind.count, kind.rollouts_per_s) for kind in pace.kinds] == [("torch · RTX 4070", 2, 2.0)]


async def test_the_engines_warm_up_does_not_count(hub: Any) -> None:
    store = hub.driven.store
    write_books(store, steps=4, slow_start=20.0)
    pace = read_pace(store, hub.config, newest_steps(store), None)
    assert pace is not None
    assert [(kind.count, kind.latency_s) for kind in pace.kinds] == [(2, 1.5), (1, 3.0)]


async def test_many_nodes_that_returned_little_are_measured_together(hub: Any) -> None:
    """Two rollouts are too few to measure the slow node alone, so all nodes of its kind are measured together."""
    store = hub.driven.store
    write_books(store, steps=1)
    pace = read_pace(store, hub.config, newest_steps(store), None)
    assert pace is not None
    slow = pace.kinds[1]
    assert (slow.name, slow.count, slow.latency_s) == ("llama_cpp · Old laptop", 1, 3.0)
    assert slow.rollouts_per_s == pytest.approx(2 / 3)


async def test_rollouts_that_no_step_can_take_are_needed_on_top(hub: Any) -> None:
    store = hub.driven.store
    write_books(store, steps=3)
    steps = newest_steps(store)
    steps[-1] = replace(steps[-1], dropped={"no_advantage": 4, "stale": 100})
    pace = read_pace(store, hub.config, steps, None)
    assert pace is not None
    assert pace.workload.rollouts_per_step == pytest.approx(8 * 1.25)


async def test_sequential_knows_no_staleness(make_hub: Any) -> None:
    hub = await make_hub("sequential", running=False)
    write_books(hub.driven.store)
    pace = read_pace(hub.driven.store, hub.config, newest_steps(hub.driven.store), None)
    assert pace is not None
    assert (pace.workload.mode, pace.workload.max_staleness) == ("sequential", 0)


def test_a_lease_that_waits_for_its_version_is_no_work() -> None:
    """Versions are trained at 10 and 20 s and reach the nodes 2 s later. Leases that wait for their version until then
    are no work.
    """
    leases = [(5.0, 6.0), (10.0, 15.0), (11.0, 11.5), (13.0, 14.0), (20.5, 23.0)]
    there = [(5.0, 6.0), (12.0, 15.0), (11.5, 11.5), (13.0, 14.0), (22.0, 23.0)]
    found = behind_versions([(begin, end, end) for begin, end in leases], [10.0, 20.0], 2.0)
    assert found == [(begin, end, end) for begin, end in there]


def test_throughput_is_that_of_a_node_with_enough_to_do() -> None:
    """Forty rollouts are sampled at once. Ten more, leased at the same time, come later and leave slots free, so only
    the forty show the throughput of the node.
    """
    leases = [(0.0, 0.0, 0.5)] * 40 + [(0.0, 0.5, 1.0)] * 10
    assert busy_rate(leases) == pytest.approx(80.0)
    assert busy_rate(leases[40:]) == pytest.approx(10.0), (
        "held rollouts that are not sampled show that the node is too slow"
    )
    assert (busy_rate([]), busy_rate([(0.0, 1.0, 1.0)])) == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 5)), min_size=1, max_size=30))
def test_throughput_lies_between_one_rollout_and_all_at_once(drawn: list[tuple[float, float]]) -> None:
    rate = busy_rate([(begin, begin, begin + seconds) for begin, seconds in drawn])
    assert rate >= 1 / max(seconds for _, seconds in drawn) * (1 - 1e-9)
    assert rate <= sum(1 / seconds for _, seconds in drawn) * (1 + 1e-9)


async def test_a_node_that_claims_to_draw_in_no_time_is_not_believed(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hub.driven.store
    write_books(store)
    honest = read_pace(store, hub.config, newest_steps(store), None)
    read = pace_module.read_recent_rollouts
    monkeypatch.setattr(
        pace_module,
        "read_recent_rollouts",
        lambda connection, newest: [replace(rollout, sampling_s=1e-9) for rollout in read(connection, newest)],
    )
    boasting = read_pace(store, hub.config, newest_steps(store), None)
    assert honest is not None and boasting is not None
    for one, other in zip(honest.nodes, boasting.nodes, strict=True):
        assert other.rollouts_per_s <= TRUSTED * one.rollouts_per_s * (1 + 1e-9)
