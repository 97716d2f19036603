from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from echo_hub.core.nodes.node import HUB_NODE_ID, UNPROVEN, NodeSettings, Samplers
from echo_hub.core.nodes.pace import RAMP
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE


def make(samplers: Samplers = "by_version", lease_size: int = 4) -> Nodes:
    return Nodes(
        NodeSettings(samplers=samplers, lease_size=lease_size, deadline_s=1.0, first_window=4_096, unproven_most=4_096)
    )


def take(nodes: Nodes, node_id: str, count: int) -> None:
    nodes.take(node_id, count, 0.0, 0.0)


def release(nodes: Nodes, node_id: str, *, overdue: bool = False) -> None:
    nodes.release(node_id, 0.0, overdue=overdue)


def join(nodes: Nodes, node_id: str, capacity: int, version: int | None = 0) -> None:
    nodes.connect(node_id)
    nodes.report(node_id, capacity, version)


def expire(nodes: Nodes, node_id: str, count: int, *, now: float) -> None:
    for _ in range(count):
        nodes.expire(node_id, now)


def next_id(nodes: Nodes, oldest: int = 0, avoid: tuple[str, ...] = ()) -> str | None:
    return next((node.node_id for node in nodes.next_ready(oldest, avoid)), None)


def test_a_node_gets_work_only_once_it_reports_capacity_and_a_version() -> None:
    nodes = make()
    nodes.connect("a")
    assert next_id(nodes) is None
    nodes.report("a", 4, None)
    assert next_id(nodes) is None
    nodes.report("a", 0, 0)
    assert next_id(nodes) is None
    nodes.report("a", 4, 0)
    assert next_id(nodes) == "a"
    nodes.report("stranger", 4, 0)
    assert nodes.num_connected == 1


def test_nodes_with_idle_places_come_before_those_that_would_only_queue() -> None:
    nodes = make()
    join(nodes, "big", 40)
    join(nodes, "small", 8)
    order = []
    while (node_id := next_id(nodes)) is not None:
        order.append(node_id)
        take(nodes, node_id, 4)
    assert order == ["big", "small", "big", "big", "big", "big", "small", *["big"] * 5]


def test_equal_nodes_take_turns() -> None:
    nodes = make()
    for node_id in "abc":
        join(nodes, node_id, 4)
    order = []
    for _ in range(6):
        node_id = next_id(nodes)
        assert node_id is not None
        order.append(node_id)
        take(nodes, node_id, 4)
        for _ in range(4):
            release(nodes, node_id)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_node_waits_until_a_quarter_of_its_places_is_free_or_a_whole_lease_fits() -> None:
    nodes = make(lease_size=4)
    for capacity, wanted in ((3, 1), (8, 2), (12, 3), (100, 4)):
        join(nodes, "a", capacity)
        take(nodes, "a", capacity)
        for _ in range(wanted):
            assert next_id(nodes) is None
            release(nodes, "a")
        assert next_id(nodes) == "a"
        for _ in range(capacity - wanted):
            release(nodes, "a")


def test_a_node_gets_only_as_much_work_as_keeps_it_busy() -> None:
    """Node a claims capacity for 100 rollouts, but samples only 4 at once, in 4 s: further rollouts would only wait on
    the node.
    """
    nodes, now = make(), 0.0
    join(nodes, "a", 100)
    for _ in range(20):
        nodes.take("a", 4, 400.0, now)
        now += 4.0
        for _ in range(4):
            nodes.measure("a", 100, sampling_s=4.0, latency_s=4.0, now=now)
            nodes.release("a", 100.0, overdue=False)
            nodes.trust("a", in_time=True)
    assert (nodes.tokens_per_s, nodes.typical_token_s) == pytest.approx((100.0, 0.04), rel=0.1)
    nodes.take("a", 7, 700.0, now)
    assert next_id(nodes) is None


def test_an_empty_pool_has_no_pace() -> None:
    """The pool's speed is a sum of floats, from which each leaving node is subtracted. Rounding may leave a remainder,
    even below 0, but the speed of an empty pool must be 0.
    """
    nodes = make()
    for number in range(1, 20):
        join(nodes, f"{number}", 8)
        nodes.take(f"{number}", 1, 100.0, 0.0)
        nodes.measure(f"{number}", 100, sampling_s=0.1 * number, latency_s=0.1 * number, now=0.1 * number)
    for number in range(1, 20):
        nodes.disconnect(f"{number}")
    assert (nodes.tokens_per_s, nodes.typical_token_s, nodes.typical_way_s) == (0.0, 0.0, 0.0)


def test_the_pools_pace_counts_only_nodes_that_take_work() -> None:
    nodes = make()
    for node_id, seconds in (("quick", 1.0), ("slow", 3.0)):
        join(nodes, node_id, 8)
        nodes.take(node_id, 1, 100.0, 0.0)
        nodes.measure(node_id, 100, sampling_s=seconds, latency_s=seconds, now=seconds)
    assert nodes.tokens_per_s == pytest.approx(100.0 + 100.0 / 3.0)
    assert nodes.typical_token_s == pytest.approx((1.0 + 1.0) / (100.0 + 100.0 / 3.0))
    nodes.disconnect("slow")
    assert (nodes.tokens_per_s, nodes.typical_token_s) == pytest.approx((100.0, 0.01))
    nodes.disconnect("quick")
    assert (nodes.tokens_per_s, nodes.typical_token_s) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_urgent_work_goes_to_nodes_by_pace() -> None:
    nodes = make()
    for node_id, seconds in (("slow", 8.0), ("quick", 1.0), ("new", 0.0)):
        join(nodes, node_id, 8)
        if seconds:
            nodes.take(node_id, 1, 100.0, 0.0)
            nodes.measure(node_id, 100, sampling_s=seconds, latency_s=seconds, now=seconds)
            nodes.release(node_id, 100.0, overdue=False)
            nodes.trust(node_id, in_time=True)

    def by_pace(fastest: float, slowest: float, *, by_speed: bool = False) -> list[str]:
        paces = (fastest, slowest)
        return [node.node_id for node in nodes.next_ready(0, (), paces=paces, by_speed=by_speed)]

    assert by_pace(0.0, 0.02) == ["new", "quick"], "an unmeasured node may be used"
    assert by_pace(0.05, 1.0) == ["new", "slow"]
    assert by_pace(0.0, 1.0, by_speed=True) == ["new", "quick", "slow"]


def test_a_proven_node_that_comes_back_keeps_its_window() -> None:
    nodes = Nodes(NodeSettings(samplers="by_version", lease_size=4, deadline_s=1.0, first_window=4, unproven_most=4))
    join(nodes, "a", 100)
    for _ in range(8):
        take(nodes, "a", 1)
        release(nodes, "a")
        nodes.trust("a", in_time=True)
    nodes.disconnect("a")
    assert nodes.num_known == 0
    join(nodes, "a", 100)
    join(nodes, "b", 100)
    assert [(node.node_id, node.limit) for node in nodes.next_ready(0, ())] == [("b", 4), ("a", 12)]


def test_a_node_is_proven_by_its_first_scored_rollout_even_after_it_leaves() -> None:
    nodes = make()
    join(nodes, "a", 4)
    assert not nodes.is_proven("a") and not nodes.is_proven("b")
    take(nodes, "a", 1)
    release(nodes, "a")
    assert not nodes.is_proven("a")
    nodes.trust("a", in_time=True)
    nodes.disconnect("a")
    assert nodes.is_proven("a")


def test_overdue_rollouts_take_up_no_capacity() -> None:
    nodes = make()
    join(nodes, "silent", 4)
    take(nodes, "silent", 4)
    expire(nodes, "silent", 4, now=0.0)
    nodes.wake(0.0)
    assert next_id(nodes) == "silent"


def test_versions_decide_in_async_mode_alone() -> None:
    nodes = make()
    nodes.published(4)
    join(nodes, "old", 4, 1)
    join(nodes, "new", 4, 3)
    assert (next_id(nodes, 2), next_id(nodes, 4)) == ("new", None)
    assert (nodes.num_candidates(0), nodes.num_candidates(2), nodes.num_candidates(0, ["old", "gone"])) == (2, 1, 1)
    nodes.report("old", 4, 4)
    assert next_id(nodes, 4) == "old"
    sequential = make("any")
    join(sequential, "old", 4, 0)
    assert next_id(sequential) == "old"


def test_only_the_hub_samples_in_colocated_mode() -> None:
    nodes = make("hub")
    join(nodes, "a", 4)
    assert next_id(nodes) is None
    join(nodes, HUB_NODE_ID, 4)
    assert next_id(nodes) == HUB_NODE_ID
    take(nodes, HUB_NODE_ID, 1)
    nodes.fail(HUB_NODE_ID, 0.0)
    nodes.expire(HUB_NODE_ID, 0.0)
    assert next_id(nodes) == HUB_NODE_ID


def test_nodes_to_avoid_keep_their_place() -> None:
    nodes = make()
    for node_id in "abc":
        join(nodes, node_id, 4)
    assert next_id(nodes, avoid=("a", "b")) == "c"
    assert next_id(nodes, avoid=("a", "b", "c")) is None
    assert next_id(nodes) == "a"


def test_a_node_that_left_is_remembered_while_it_holds_work() -> None:
    nodes = make()
    join(nodes, "a", 4)
    take(nodes, "a", 2)
    nodes.disconnect("a")
    nodes.disconnect("stranger")
    assert (next_id(nodes), nodes.held_by_node, nodes.num_candidates(0)) == (None, {"a": 2}, 0)
    join(nodes, "a", 6)
    assert next_id(nodes) == "a"
    nodes.disconnect("a")
    release(nodes, "a")
    release(nodes, "a")
    assert nodes.held_by_node == {}
    with pytest.raises(KeyError):
        release(nodes, "a")


def test_a_version_that_is_not_published_is_no_better_than_the_newest() -> None:
    nodes = make()
    join(nodes, "liar", 4, 99)
    join(nodes, "honest", 4, 0)
    assert (nodes.num_candidates(0), nodes.num_candidates(1), next_id(nodes, 1)) == (2, 0, None)
    nodes.published(1)
    nodes.report("liar", 4, 99)
    assert (nodes.num_candidates(1), next_id(nodes, 1)) == (1, "liar")


def test_counts_are_right_after_any_events() -> None:
    chance, nodes, now = Random(7), make(), 0.0
    held: Counter[str] = Counter()
    for turn in range(20_000):
        node_id, now = f"n{chance.randrange(30)}", now + 0.01
        nodes.published(turn // 1_000)
        match chance.randrange(9):
            case 0:
                join(nodes, node_id, 8)
            case 1:
                nodes.disconnect(node_id)
            case 2:
                nodes.fail(node_id, now)
            case 3:
                nodes.trust(node_id, in_time=chance.random() < 0.5)
            case 4 if held[node_id]:
                nodes.measure(node_id, 10, sampling_s=0.1, latency_s=0.2, now=now)
                nodes.release(node_id, 5.0, overdue=False)
                held[node_id] -= 1
            case 5 if turn % 50 == 0:
                nodes.wake(now)
            case 6 if (found := next(nodes.next_ready(turn // 1_000, (node_id,)), None)) is not None:
                assert found.node_id != node_id and found.free > 0
                nodes.take(found.node_id, 1, 5.0, now)
                held[found.node_id] += 1
            case _:
                nodes.report(node_id, chance.randrange(12), chance.randrange(turn // 1_000 + 1))
        assert dict(nodes.held_by_node) == {node: count for node, count in held.items() if count}
        assert nodes.num_ready <= nodes.num_candidates(0) <= nodes.num_connected <= 30
    assert nodes.tokens_per_s > 0.0


def test_finding_the_next_node_costs_the_same_for_any_number_of_nodes() -> None:
    nodes = make()
    for number in range(2_000):
        join(nodes, str(number), 8)
    looked_at = 0

    class Nobody(tuple[str, ...]):
        def __contains__(self, node_id: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return False

    assert next(nodes.next_ready(0, Nobody())).node_id == "0"
    assert looked_at <= 2


def test_a_node_with_an_overdue_rollout_counts_as_slow() -> None:
    """Node b has returned nothing yet, but its overdue rollout shows that it is slower than node a."""
    nodes = make()
    for node_id in ("a", "b"):
        join(nodes, node_id, 8)
        nodes.take(node_id, 2, 200.0, 0.0)
    for _ in range(4):
        nodes.measure("a", 100, sampling_s=1.0, latency_s=1.0, now=1.0)
    nodes.trust("a", in_time=True)
    a, b = nodes.get("a"), nodes.get("b")
    assert a is not None and b is not None
    nodes.miss("b", 100.0, 0.5)
    assert b.speed == UNPROVEN, "no node would have been faster"
    nodes.miss("b", 100.0, 30.0)
    assert b.pace.token_s == pytest.approx(0.6) and b.speed > a.speed
    assert [node.node_id for node in nodes.next_ready(0, (), paces=(0.0, 0.1))] == ["a"]


def test_nodes_without_a_returned_rollout_hold_a_share_of_all_held_work() -> None:
    settings = NodeSettings(samplers="by_version", lease_size=1, deadline_s=1.0, first_window=64, unproven_most=2)
    nodes = Nodes(settings)
    join(nodes, "a", 64)
    join(nodes, "b", 64)
    nodes.trust("a", in_time=True)
    take(nodes, "b", 2)
    assert not nodes.unproven_may
    changes = nodes.num_changes
    take(nodes, "a", 3 * UNPROVEN_SHARE)
    assert nodes.unproven_may
    take(nodes, "b", 1)
    assert not nodes.unproven_may
    release(nodes, "b")
    assert nodes.unproven_may and nodes.num_changes > changes


def test_a_stranger_is_given_one_rollout_until_it_has_returned_one() -> None:
    settings = NodeSettings(samplers="by_version", lease_size=8, deadline_s=1.0, first_window=4, unproven_most=64)
    nodes = Nodes(settings)
    for node_id in ("a", "b", "c"):
        join(nodes, node_id, 64)
    b = nodes.get("b")
    assert b is not None and nodes.room(b) == 4, "no node is known yet"
    nodes.trust("a", in_time=True)
    assert nodes.room(b) == 1
    take(nodes, "b", 1)
    assert [node.node_id for node in nodes.next_ready(0, ())] == ["c", "a"]
    release(nodes, "b")
    nodes.trust("b", in_time=True)
    assert nodes.room(b) == 2


def test_a_first_lease_is_sized_by_the_claimed_speed_within_the_strangers_limit() -> None:
    settings = NodeSettings(samplers="any", lease_size=1, deadline_s=60.0, first_window=4, unproven_most=64)
    nodes = Nodes(settings)

    def room(node_id: str, capacity: int, tokens_per_s: float) -> int:
        nodes.connect(node_id)
        nodes.report(node_id, capacity, 0, tokens_per_s=tokens_per_s)
        node = nodes.get(node_id)
        assert node is not None
        return nodes.room(node)

    assert room("first", 4_096, 1e9) == 16, "a quarter of 64"
    take(nodes, "first", 16)
    assert room("second", 4_096, 1e9) == 12, "a quarter of what is left"
    nodes.measure("first", 100, sampling_s=2.0, latency_s=2.0, now=2.0)
    for _ in range(16):
        release(nodes, "first")
    nodes.trust("first", in_time=True)
    assert room("slow", 8, 40.0) == 1, "a rollout on the known node takes 0.02 s per token"
    assert room("faster", 1_024, 400.0) == 8
    assert room("narrow", 8, 1e9) == 4
    assert room("unmeasured", 4_096, 0.0) == 1
    assert room("slowest", 4_096, 5e-324) == 1


def test_a_window_grows_faster_while_a_node_keeps_its_promise() -> None:
    nodes = Nodes(NodeSettings(samplers="any", lease_size=1, deadline_s=60.0, first_window=4, unproven_most=64))
    windows = {}
    for node_id, tokens_per_s in (("keeps it", 100.0), ("breaks it", 1e9), ("claims nothing", 0.0)):
        nodes.connect(node_id)
        nodes.report(node_id, 512, 0, tokens_per_s=tokens_per_s)
        take(nodes, node_id, 1)
        nodes.measure(node_id, 100, sampling_s=2.0, latency_s=2.0, now=2.0)
        for _ in range(2):
            nodes.trust(node_id, in_time=True)
        node = nodes.get(node_id)
        assert node is not None
        windows[node_id] = node.window
    assert windows == {"keeps it": 4 + 2 * (RAMP - 1), "breaks it": 1 + 2, "claims nothing": 1 + 2}
    keeps_it = nodes.get("keeps it")
    assert keeps_it is not None
    nodes.expire("keeps it", 60.0)
    nodes.trust("keeps it", in_time=True)
    assert keeps_it.window == 1 + 1, "an overdue rollout breaks it, too"


def test_strangers_are_last_where_that_is_asked_for() -> None:
    nodes = make()
    join(nodes, "known", 8)
    join(nodes, "new", 8)
    nodes.trust("known", in_time=True)
    assert [node.node_id for node in nodes.next_ready(0, ())] == ["new", "known"]
    assert [node.node_id for node in nodes.next_ready(0, (), unproven_last=True)] == ["known", "new"]


def test_strangers_that_return_nothing_hold_less_together() -> None:
    settings = NodeSettings(samplers="by_version", lease_size=1, deadline_s=60.0, first_window=4, unproven_most=8)
    nodes = Nodes(settings)
    join(nodes, "known", 64)
    nodes.trust("known", in_time=True)
    for number in range(40):
        join(nodes, f"key{number}", 4_096)
    for number in range(4):
        take(nodes, f"key{number}", 1)
        nodes.mark_late(f"key{number}", 10.0)
        release(nodes, f"key{number}")
    assert next_id(nodes) == "key4", "a late node rests"
    take(nodes, "key4", 1)
    assert nodes.unproven_may
    take(nodes, "key5", 1)
    assert not nodes.unproven_may, "two of eight places are left"
    nodes.expire("key4", 60.0)
    assert nodes.unproven_may, "an overdue rollout no longer counts as held"


def test_fresh_keys_of_one_address_hold_a_small_part_of_what_strangers_may() -> None:
    nodes = Nodes(NodeSettings(samplers="any", lease_size=1, deadline_s=60.0, first_window=4, unproven_most=16))
    nodes.connect("old")
    nodes.report("old", 4, 0)
    nodes.take("old", 1, 0.0, 0.0)
    nodes.release("old", 0.0, overdue=False)
    nodes.trust("old", in_time=True)
    for number in range(20):
        nodes.connect(f"key {number}", origin="192.0.2.1")
        nodes.report(f"key {number}", 4, 0)
    given = []
    while strangers := [node for node in nodes.next_ready(0, ("old",)) if not node.proven]:
        given.append(strangers[0].node_id)
        nodes.take(given[-1], 1, 0.0, 0.0)
    assert given == ["key 0", "key 1", "key 2", "key 3"], "a quarter of sixteen"
    nodes.release("key 1", 0.0, overdue=False)
    nodes.trust("key 1", in_time=True)
    assert [node.node_id for node in nodes.next_ready(0, ("old", "key 1"))] == ["key 4"], "another key gets its place"
    nodes.disconnect("key 4")
    assert [node.node_id for node in nodes.next_ready(0, ("old", "key 1"))] == ["key 5"]


def test_a_quarantined_node_gets_no_work_from_any_address() -> None:
    nodes = Nodes(NodeSettings(samplers="any", lease_size=1, deadline_s=60.0, first_window=4, unproven_most=16))
    nodes.connect("a")
    nodes.report("a", 4, 0)
    nodes.quarantine("a")
    assert not nodes.any_ready and nodes.is_quarantined("a")
    nodes.disconnect("a")
    nodes.connect("a")
    nodes.report("a", 4, 0)
    assert not nodes.any_ready
    nodes.release_from_quarantine("a")
    assert nodes.any_ready
