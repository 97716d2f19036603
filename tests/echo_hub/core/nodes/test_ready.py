from __future__ import annotations

import pytest

from echo_hub.core.nodes.ready import FIRST_REST_S, FORGIVEN_BY_ONE, MAX_REST_S, Fleet
from echo_hub.core.settings import HUB_NODE_ID, CoordinatorSettings, Mode


def fleet(mode: Mode = "async", group_size: int = 4) -> Fleet:
    return Fleet(
        CoordinatorSettings(
            mode=mode, steps=1, groups_per_step=1, group_size=group_size, deadline_s=1.0, max_staleness=5
        )
    )


def join(fleet: Fleet, node_id: str, capacity: int, version: int | None = 0) -> None:
    fleet.connect(node_id)
    fleet.report(node_id, capacity, version)


def expire(fleet: Fleet, node_id: str, count: int, *, now: float) -> None:
    for _ in range(count):
        fleet.expire(node_id, now)


def next_id(fleet: Fleet, oldest: int = 0, avoid: tuple[str, ...] = ()) -> str | None:
    node = fleet.next_ready(oldest, avoid)
    return None if node is None else node.node_id


def test_a_node_gets_work_only_once_it_reports_capacity_and_a_version() -> None:
    nodes = fleet()
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


def test_one_problem_that_ends_scoring_processes_is_not_its_nodes_fault_and_several_are() -> None:
    nodes = fleet()
    join(nodes, "a", 8)
    for _ in range(3):
        nodes.kill_scorer("a", 7, now=0.0)
    assert next_id(nodes) == "a"
    for group_id, (now, rest_s) in enumerate([(0.0, FIRST_REST_S), (10.0, 2 * FIRST_REST_S)]):
        nodes.kill_scorer("a", group_id, now=now)
        nodes.trust("a")
        nodes.wake(now + rest_s - 0.1)
        assert next_id(nodes) is None, "a good one in between does not end its rest"
        nodes.wake(now + rest_s)
        assert next_id(nodes) == "a"


def test_deaths_are_made_up_for_by_many_good_rollouts() -> None:
    nodes = fleet()
    join(nodes, "a", 8)
    nodes.kill_scorer("a", 0, now=0.0)
    for group_id in range(1, 20):
        now = 100.0 * group_id
        nodes.kill_scorer("a", group_id, now=now)
        nodes.wake(now + FIRST_REST_S)
        assert next_id(nodes) == "a", "its rests do not grow"
        for _ in range(round(1 / FORGIVEN_BY_ONE)):
            nodes.trust("a")


def test_the_hub_itself_is_not_rested_for_what_ends_scoring_processes() -> None:
    nodes = fleet(mode="colocated")
    join(nodes, HUB_NODE_ID, 8)
    for group_id in range(3):
        nodes.kill_scorer(HUB_NODE_ID, group_id, now=0.0)
        nodes.kill_scorer("unknown", group_id, now=0.0)
    assert next_id(nodes) == HUB_NODE_ID


def test_the_least_loaded_share_is_next_then_whoever_waited_longest() -> None:
    nodes = fleet()
    join(nodes, "big", 40)
    join(nodes, "small", 8)
    order = []
    for lease_id in range(1, 8):
        node = nodes.next_ready(0, ())
        assert node is not None
        order.append(node.node_id)
        nodes.take(node.node_id, 4, lease_id)
    assert order == ["big", "small", "big", "big", "big", "big", "small"]


def test_equal_nodes_take_turns() -> None:
    nodes = fleet()
    for node_id in "cab":
        join(nodes, node_id, 4)
    order = []
    for lease_id in range(1, 7):
        node = nodes.next_ready(0, ())
        assert node is not None
        order.append(node.node_id)
        nodes.take(node.node_id, 4, lease_id)
        for _ in range(4):
            nodes.release(node.node_id, overdue=False)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_node_waits_until_a_whole_group_fits() -> None:
    nodes = fleet()
    join(nodes, "a", 6)
    nodes.take("a", 4, 1)
    for _ in range(2):
        assert next_id(nodes) is None
        nodes.release("a", overdue=False)
    assert next_id(nodes) == "a"


def test_a_node_smaller_than_a_group_works_in_halves() -> None:
    nodes = fleet(group_size=8)
    join(nodes, "a", 3)
    nodes.take("a", 3, 1)
    nodes.release("a", overdue=False)
    assert next_id(nodes) is None
    nodes.release("a", overdue=False)
    assert next_id(nodes) == "a"


def test_overdue_rollouts_take_up_no_capacity_but_cost_the_place() -> None:
    nodes = fleet()
    join(nodes, "silent", 4)
    nodes.take("silent", 4, 1)
    expire(nodes, "silent", 4, now=0.0)
    nodes.wake(0.0)
    assert next_id(nodes) == "silent"
    join(nodes, "quick", 8)
    nodes.take("quick", 4, 2)
    assert next_id(nodes) == "quick"


def test_versions_decide_in_async_mode_alone() -> None:
    nodes = fleet()
    join(nodes, "old", 4, 1)
    join(nodes, "new", 4, 3)
    assert (next_id(nodes, 2), next_id(nodes, 4)) == ("new", None)
    assert (nodes.num_candidates(0), nodes.num_candidates(2), nodes.num_candidates(0, ["old", "gone"])) == (2, 1, 1)
    nodes.report("old", 4, 4)
    assert next_id(nodes, 4) == "old"
    sequential = fleet("sequential")
    join(sequential, "old", 4, 0)
    assert next_id(sequential) == "old"


def test_only_the_hub_samples_in_colocated_mode() -> None:
    nodes = fleet("colocated")
    join(nodes, "a", 4)
    assert next_id(nodes) is None
    join(nodes, HUB_NODE_ID, 4)
    assert next_id(nodes) == HUB_NODE_ID
    nodes.take(HUB_NODE_ID, 1, 1)
    nodes.fail(HUB_NODE_ID, 0.0)
    nodes.expire(HUB_NODE_ID, 0.0)
    assert next_id(nodes) == HUB_NODE_ID


def test_nodes_to_avoid_keep_their_place() -> None:
    nodes = fleet()
    for node_id in "abc":
        join(nodes, node_id, 4)
    assert next_id(nodes, avoid=("a", "b")) == "c"
    assert next_id(nodes, avoid=("a", "b", "c")) is None
    assert next_id(nodes) == "a"


def test_a_silent_node_gets_one_lease_at_a_time_until_it_is_trusted_again() -> None:
    nodes = fleet()
    join(nodes, "a", 100)
    nodes.take("a", 8, 1)
    expire(nodes, "a", 4, now=0.0)
    assert next_id(nodes) is None, "the rest of what it holds comes first"
    expire(nodes, "a", 4, now=1.0)
    nodes.wake(1.0)
    assert next_id(nodes) == "a"
    nodes.take("a", 4, 2)
    assert next_id(nodes) is None
    nodes.trust("a")
    assert next_id(nodes) == "a"


def test_a_node_that_stays_silent_rests_for_more_and_more_deadlines() -> None:
    nodes = fleet()
    join(nodes, "a", 4)
    now, rests = 0.0, []
    for lease_id in range(1, 5):
        nodes.take("a", 4, lease_id)
        expire(nodes, "a", 4, now=now)
        began = now
        nodes.wake(now)
        while next_id(nodes) is None:
            now += 1.0
            nodes.wake(now)
        rests.append(now - began)
    assert rests == [0.0, 4.0, 16.0, 16.0]


def test_a_failing_node_rests_twice_as_long_each_time_whatever_it_reports() -> None:
    nodes = fleet()
    join(nodes, "a", 4)
    nodes.fail("stranger", 0.0)
    now, rest_s = 0.0, FIRST_REST_S
    for _ in range(10):
        nodes.fail("a", now)
        nodes.fail("a", now + rest_s / 2)  # Of the same failure.
        nodes.wake(now + rest_s * 0.99)
        nodes.report("a", 4, 0)
        assert (next_id(nodes), nodes.num_candidates(0)) == (None, 0)
        now += rest_s
        nodes.wake(now)
        assert next_id(nodes) == "a"
        rest_s = min(MAX_REST_S, 2 * rest_s)
    nodes.fail("a", now)
    nodes.trust("a")
    assert next_id(nodes) == "a"
    nodes.fail("a", now)
    nodes.wake(now + FIRST_REST_S)
    assert next_id(nodes) == "a"


def test_a_node_does_not_shorten_its_rest_by_leaving() -> None:
    nodes = fleet()
    join(nodes, "a", 4)
    nodes.fail("a", 0.0)
    nodes.disconnect("a")
    join(nodes, "a", 4)
    assert next_id(nodes) is None
    nodes.disconnect("a")
    nodes.wake(FIRST_REST_S)
    assert nodes._nodes == {}


def test_a_node_that_left_is_remembered_while_it_holds_work() -> None:
    nodes = fleet()
    join(nodes, "a", 4)
    nodes.take("a", 2, 1)
    nodes.disconnect("a")
    nodes.disconnect("stranger")
    assert (next_id(nodes), nodes.held_by_node, nodes.num_candidates(0)) == (None, {"a": 2}, 0)
    join(nodes, "a", 6)
    assert next_id(nodes) == "a"
    nodes.disconnect("a")
    nodes.release("a", overdue=False)
    nodes.release("a", overdue=False)
    assert nodes.held_by_node == {}
    with pytest.raises(KeyError):
        nodes.release("a", overdue=False)


def test_reports_without_end_need_no_memory_without_end() -> None:
    nodes = fleet()
    for node_id in "ab":
        join(nodes, node_id, 4)
    for turn in range(10_000):
        nodes.report("b", 4 * (turn % 2), 0)
    nodes.report("b", 4, 0)
    assert sum(map(len, nodes._ready.values())) < 200
    nodes.take("a", 4, 1)
    assert next_id(nodes) == "b"
