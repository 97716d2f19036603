from __future__ import annotations

from echo_shared.wire.messages import DropReason
from tests.echo_hub.core.books import Books


def test_wanting_follows_every_change() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    assert ledger.groups[0].unleased == {0, 1} and 0 in books.wanting
    books.lease(0, 0)
    assert ledger.groups[0].unleased == {1}
    books.lease(0, 1)
    assert 0 not in books.wanting
    ledger.expire(ledger.rollouts["1-0"], 0.0)
    assert ledger.groups[0].unleased == {0} and 0 in books.wanting
    books.receive("1-0", score=False)
    assert 0 not in books.wanting
    ledger.drop([ledger.rollouts["1-0"]], DropReason.INVALID)
    assert ledger.groups[0].unleased == {0} and 0 in books.wanting
    assert books.nodes.held_by_node == {"a": 1}


def test_a_group_without_requests_wants_nothing() -> None:
    books = Books()
    books.open(0)
    group = books.ledger.groups[0]
    group.asked_for = False
    books.ledger.wants.settle(group, 0)
    num_changes = books.ledger.wants.num_changes
    books.ledger.wants.note(group, 0)
    assert group.unleased == {1} and books.ledger.wants.num_changes == num_changes
    books.ledger.ask_for(group)
    assert group.unleased == {0, 1} and books.ledger.wants.num_changes == num_changes + 1
