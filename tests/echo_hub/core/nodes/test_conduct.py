from __future__ import annotations

from echo_hub.core.nodes.conduct import FIRST_REST_S, FORGIVEN_BY_ONE, MAX_REST_S, Conduct
from echo_hub.core.nodes.node import HUB_NODE_ID, Node, NodeSettings, Samplers
from echo_hub.core.nodes.ready import Nodes


def make(samplers: Samplers = "by_version") -> Nodes:
    return Nodes(NodeSettings(samplers=samplers, lease_size=4, deadline_s=1.0, first_window=4_096, unproven_most=4_096))


def take(nodes: Nodes, node_id: str, count: int) -> None:
    nodes.take(node_id, count, 0.0, 0.0)


def join(nodes: Nodes, node_id: str, capacity: int) -> None:
    nodes.connect(node_id)
    nodes.report(node_id, capacity, 0)


def expire(nodes: Nodes, node_id: str, count: int, *, now: float) -> None:
    for _ in range(count):
        nodes.expire(node_id, now)


def next_id(nodes: Nodes) -> str | None:
    return next((node.node_id for node in nodes.next_ready(0, ())), None)


def test_scoring_crashes_are_the_nodes_fault_only_for_several_problems() -> None:
    nodes = make()
    join(nodes, "a", 8)
    nodes.trust("a", in_time=True)
    for _ in range(3):
        nodes.kill_scorer("a", 7, now=0.0)
    assert next_id(nodes) == "a"
    for group_id, (now, rest_s) in enumerate([(0.0, FIRST_REST_S), (10.0, 2 * FIRST_REST_S)]):
        nodes.kill_scorer("a", group_id, now=now)
        nodes.trust("a", in_time=True)
        nodes.wake(now + rest_s - 0.1)
        assert next_id(nodes) is None, "a good rollout in between does not end the rest"
        nodes.wake(now + rest_s)
        assert next_id(nodes) == "a"


def test_deaths_are_made_up_for_by_many_good_rollouts() -> None:
    nodes = make()
    join(nodes, "a", 8)
    nodes.trust("a", in_time=True)
    nodes.kill_scorer("a", 0, now=0.0)
    for group_id in range(1, 20):
        now = 100.0 * group_id
        nodes.kill_scorer("a", group_id, now=now)
        nodes.wake(now + FIRST_REST_S)
        assert next_id(nodes) == "a", "the rests do not grow"
        for _ in range(round(1 / FORGIVEN_BY_ONE)):
            nodes.trust("a", in_time=True)


def test_a_node_whose_completions_always_crash_scoring_rests_long() -> None:
    nodes = make()
    join(nodes, "a", 8)
    nodes.kill_scorer("a", 0, now=0.0)
    assert next_id(nodes) == "a"
    for now, group_id in ((0.0, 1), (100.0, 2)):
        nodes.kill_scorer("a", group_id, now=now)
        nodes.wake(now + MAX_REST_S - 0.1)
        assert next_id(nodes) is None
        nodes.wake(now + MAX_REST_S)
        assert next_id(nodes) == "a"


def test_the_hubs_own_node_does_not_rest_after_scoring_crashes() -> None:
    nodes = make("hub")
    join(nodes, HUB_NODE_ID, 8)
    for group_id in range(3):
        nodes.kill_scorer(HUB_NODE_ID, group_id, now=0.0)
        nodes.kill_scorer("unknown", group_id, now=0.0)
    assert next_id(nodes) == HUB_NODE_ID


def test_a_silent_node_is_asked_for_one_at_a_time_until_it_is_trusted_again() -> None:
    nodes = make()
    join(nodes, "a", 100)
    take(nodes, "a", 8)
    nodes.trust("a", in_time=True)
    expire(nodes, "a", 8, now=1.0)
    nodes.wake(1.0)
    assert next_id(nodes) == "a", "it has returned good work before"
    take(nodes, "a", 1)
    assert next_id(nodes) is None
    for _ in range(4):
        nodes.trust("a", in_time=True)
    assert next_id(nodes) == "a"


def test_a_node_that_never_returns_anything_rests_for_more_and_more_deadlines() -> None:
    nodes = make()
    join(nodes, "a", 4)
    join(nodes, "other", 0)
    now, rests = 0.0, []
    for _ in range(4):
        nodes.report("other", 1, 0)
        take(nodes, "other", nodes.held_by_node.get("other", 0) == 0)
        take(nodes, "a", 1)
        expire(nodes, "a", 1, now=now)
        began = now
        nodes.wake(now)
        while next_id(nodes) is None:
            now += 1.0
            nodes.wake(now)
        rests.append(now - began)
    assert rests == [0.0, 4.0, 16.0, 16.0]


def test_a_node_that_is_alone_does_not_rest_for_silence() -> None:
    nodes = make()
    join(nodes, "a", 4)
    for now in (0.0, 1.0, 2.0):
        take(nodes, "a", 1)
        expire(nodes, "a", 1, now=now)
        nodes.wake(now)
        assert next_id(nodes) == "a"
    nodes.fail("a", 3.0)
    nodes.wake(3.0)
    assert next_id(nodes) is None, "it would return the work again"


def test_a_failing_node_rests_twice_as_long_each_time_regardless_of_its_reports() -> None:
    nodes = make()
    join(nodes, "a", 4)
    nodes.fail("stranger", 0.0)
    now, rest_s = 0.0, FIRST_REST_S
    for _ in range(10):
        nodes.fail("a", now)
        nodes.fail("a", now + rest_s / 2)  # A second failure within the pause belongs to the same incident.
        nodes.wake(now + rest_s * 0.99)
        nodes.report("a", 4, 0)
        assert (next_id(nodes), nodes.num_candidates(0)) == (None, 0)
        now += rest_s
        nodes.wake(now)
        assert next_id(nodes) == "a"
        rest_s = min(MAX_REST_S, 2 * rest_s)
    nodes.fail("a", now)
    nodes.trust("a", in_time=True)
    assert next_id(nodes) == "a"
    nodes.fail("a", now)
    nodes.wake(now + FIRST_REST_S)
    assert next_id(nodes) == "a"


def test_a_node_does_not_shorten_its_rest_by_leaving() -> None:
    nodes = make()
    join(nodes, "a", 4)
    nodes.fail("a", 0.0)
    nodes.disconnect("a")
    join(nodes, "a", 4)
    assert next_id(nodes) is None
    nodes.disconnect("a")
    nodes.wake(FIRST_REST_S)
    assert nodes.num_known == 0


def test_ends_of_rests_are_forgotten_when_trust_ended_them() -> None:
    conduct, nodes = Conduct(deadline_s=1.0), [Node(str(number), window=4) for number in range(20)]
    for turn in range(100):
        for node in nodes:
            conduct.fail(node, 0.001 * turn)
        assert len(conduct._ends) <= 2 * len(nodes)
        for node in nodes[1:]:
            conduct.trust(node)
        assert len(conduct._ends) <= 2, "only the node that still rests is stored"
    assert conduct.wake(FIRST_REST_S - 0.001, all_silent=False) == []
    assert conduct.wake(FIRST_REST_S, all_silent=False) == nodes[:1]
    assert nodes[0].rests_until is None
    assert (conduct.wake(1e9, all_silent=False), len(conduct._ends)) == ([], 0)


def test_a_rest_is_prolonged_but_never_cut_short() -> None:
    conduct, node = Conduct(deadline_s=60.0), Node("a", window=4, held=1, overdue=1)
    conduct.expire(node, 0.0)
    assert conduct.wake(0.0, all_silent=False) == [node]
    conduct.fail(node, 0.0)
    conduct.expire(node, 0.5)
    assert node.rests_until == 240.5
    assert conduct.wake(FIRST_REST_S, all_silent=False) == []
    conduct.kill_scorer(node, 1, 2.0)
    conduct.kill_scorer(node, 2, 3.0)
    assert node.rests_until == 240.5
    assert conduct.wake(240.5, all_silent=False) == [node]


def test_a_stranger_whose_rollout_is_late_rests_for_a_deadline_or_until_one_is_scored() -> None:
    nodes = make()
    for node_id in ("known", "slow", "silent"):
        join(nodes, node_id, 8)
    nodes.trust("known", in_time=True)
    for node_id in ("slow", "silent", "known"):
        take(nodes, node_id, 8 if node_id == "known" else 1)
        nodes.mark_late(node_id, 10.0)
    for node_id in ("slow", "silent"):
        nodes.release(node_id, 0.0, overdue=False)
    assert next_id(nodes) is None
    nodes.trust("slow", in_time=True)
    assert next_id(nodes) == "slow"
    nodes.wake(10.9)
    silent, known = nodes.get("silent"), nodes.get("known")
    assert silent is not None and silent.rests_until == 11.0
    assert known is not None and known.rests_until is None, "its window shrinks when the rollout is overdue"
    nodes.wake(11.0)
    assert next_id(nodes) == "silent"
