from __future__ import annotations

from typing import Any

import pytest

from echo_hub.core.policy.sizing import ANY, LeaseTerms
from echo_hub.core.policy.takers import Takers
from tests.echo_hub.core.books import Books


class Room(Books):
    """Connected nodes that have returned a rollout in time. Counts the searches for a node with free capacity."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *node_ids: str) -> None:
        super().__init__()
        for node_id in node_ids:
            self.nodes.connect(node_id)
            self.nodes.report(node_id, 100, 0)
            self.nodes.trust(node_id, in_time=True)
        self.takers = Takers(ledger=self.ledger, nodes=self.nodes)
        self.num_searches = 0
        search = self.nodes.next_ready

        def counted(*asked: Any, **named: Any) -> Any:
            self.num_searches += 1
            return search(*asked, **named)

        monkeypatch.setattr(self.nodes, "next_ready", counted)

    def failed(self, group_id: int, *node_ids: str) -> Any:
        self.open(group_id)
        group = self.ledger.groups[group_id]
        group.is_plain = False
        for index, slot in enumerate(group.slots):
            slot.failed_on = node_ids
            self.ledger.wants.note(group, index)
        return group


def test_a_failed_search_holds_for_all_groups_with_equal_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a", "b")
    room.nodes.report("a", 1, 0)
    room.nodes.take("a", 1, 5.0, 4.0)  # Node a has no capacity left.
    groups = [room.failed(number, "b") for number in range(50)]
    for group in groups:
        assert room.takers.find(group, ANY, room.takers.avoided(group.slots[0], 0)) is None
    assert room.num_searches == 1


def test_a_group_that_failed_elsewhere_is_searched_for_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a", "b")
    for number, (failed_on, found) in enumerate([("a", "b"), ("b", "a"), ("a", "b")]):
        group = room.failed(number, failed_on)
        taken = room.takers.find(group, ANY, room.takers.avoided(group.slots[0], 0))
        assert taken is not None and taken[0].node_id == found


def test_a_failed_search_is_not_repeated_until_something_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(monkeypatch, "a")
    first, second, other = room.failed(0, "a"), room.failed(1, "a"), room.failed(2, "a", "b")
    room.takers.note_nobody(first, ANY)
    assert not room.takers.any_left(second, ANY), "it has failed on the same nodes"
    assert room.takers.any_left(other, ANY)
    assert room.takers.any_left(second, LeaseTerms(in_s=7.0)), "on other terms a node may be found"
    second.slots[0].failed_on = ()
    room.ledger.wants.note(second, 0)
    assert room.takers.any_left(second, ANY), "one of its members may now go to any node"
    room.takers.begin()
    assert room.takers.any_left(first, ANY), "a node may have capacity by now"


def test_an_index_avoids_the_nodes_it_failed_on_while_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a", "b")
    avoided = [room.takers.avoided(room.failed(n, *on).slots[0], 0) for n, on in enumerate([(), "a", "ab", "ba"])]
    assert avoided == [(), ("a",), ("b",), ("a",)], "if it failed on all nodes, the latest one is avoided"
    room.nodes.disconnect("b")
    room.takers.begin()
    assert room.takers.avoided(room.failed(9, "a").slots[0], 0) == (), "no other node is there"
    assert room.takers.most_avoided == 0


def test_groups_of_different_lengths_are_searched_for_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a")
    short, long = room.failed(0), room.failed(1)
    short.expected_tokens, long.expected_tokens = 4.0, 4_000.0
    room.nodes.take("a", 1, 100.0, 4.0)
    room.nodes.measure("a", 100, sampling_s=1.0, latency_s=1.0, now=5.0)
    room.nodes.release("a", 100.0, overdue=False)
    terms = LeaseTerms(in_s=2.0)
    assert room.takers.find(long, terms) is None
    found = room.takers.find(short, terms)
    assert found is not None and found[0].node_id == "a"


def test_nodes_that_refuse_a_tenant_get_none_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a", "b", "c")
    room.nodes.unwilling.connected("a", answers=False, refuses=frozenset())
    room.nodes.unwilling.connected("b", answers=True, refuses=frozenset({"Ada"}))
    ada, bob, own = room.failed(0), room.failed(1), room.failed(2)
    ada.tenant, bob.tenant = "Ada", "Bob"
    found = {name: set[str]() for name in ("ada", "bob", "own")}
    for name, group in (("ada", ada), ("bob", bob), ("own", own)):
        avoid: tuple[str, ...] = ()
        while (taken := room.takers.find(group, ANY, avoid)) is not None:
            found[name].add(taken[0].node_id)
            avoid = (*avoid, taken[0].node_id)
    assert found == {"ada": {"c"}, "bob": {"b", "c"}, "own": {"a", "b", "c"}}


def test_an_index_that_failed_on_all_willing_nodes_is_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a", "b")
    room.nodes.unwilling.connected("a", answers=False, refuses=frozenset())
    group = room.failed(0, "b")
    group.tenant = "Ada"
    avoid = room.takers.avoided(group.slots[0], 0, room.takers.unwilling(group))
    taken = room.takers.find(group, ANY, avoid)
    assert avoid == () and taken is not None and taken[0].node_id == "b"


def test_a_tenant_that_all_refuse_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "a")
    room.nodes.unwilling.connected("a", answers=True, refuses=frozenset({"Ada"}))
    ada, bob = room.failed(0), room.failed(1)
    ada.tenant, bob.tenant = "Ada", "Bob"
    assert room.takers.find(ada, ANY) is None
    room.takers.note_nobody(ada, ANY)
    assert not room.takers.any_left(ada, ANY) and room.takers.any_left(bob, ANY)
    taken = room.takers.find(bob, ANY)
    assert taken is not None and taken[0].node_id == "a"
