from __future__ import annotations

from math import isclose
from typing import Any

import pytest

from echo_hub.store import owners
from echo_hub.store.board import read_board, read_credited_node
from echo_hub.store.credits import read_credits
from echo_hub.store.owners import read_counts_once, read_owned, recount_owners, set_counts_once
from echo_hub.store.store import Store
from echo_shared.records.credit import BoardQuery, CreditStanding

KEY, OTHER = bytes([7]) * 32, bytes([8]) * 32
OWNER = KEY.hex()
DAY_S = 86_400.0


def join(store: Store, node_id: str, owner_key: bytes = b"", at: float = 1.0) -> None:
    store.node_seen(
        node_id=node_id,
        public_key=bytes(32),
        name=f"the {node_id}",
        backend="torch",
        device="cpu",
        now=at,
        owner_key=owner_key,
        owner_claim=bytes(64) if owner_key else b"",
    )


@pytest.fixture
def books(store: Store, records: Any) -> Store:
    """Return a store in which nodes a, b and c have one, two and one trained steps of two rollouts, on two days. The
    owner with the key KEY owns nodes a and b.
    """
    for node_id, owner_key in (("a", KEY), ("b", KEY), ("c", b"")):
        join(store, node_id, owner_key)
    for step, (node_id, at) in enumerate((("a", 1.0), ("b", 1.0), ("b", DAY_S + 1), ("c", 1.0)), 1):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id=node_id), now=at)
    store.count_all()
    return store


def board(store: Store, **wanted: Any) -> dict[str, CreditStanding]:
    return {row.name: row for row in store.read(read_board, BoardQuery(**wanted), DAY_S + 2).rows}


def count_once(store: Store, *, counts_once: bool = True) -> None:
    store.write(set_counts_once, OWNER, counts_once=counts_once)
    store.write(recount_owners)


def test_an_owner_s_nodes_are_listed_with_their_credit(books: Store) -> None:
    join(books, "a", KEY, at=9.0)
    assert [(node.node_id, node.rollouts) for node in books.read(read_owned, OWNER)] == [("a", 2), ("b", 4)]
    assert books.read(read_owned, OTHER.hex()) == ()


def test_an_owner_may_be_counted_once(books: Store) -> None:
    apart = board(books)
    assert set(apart) == {"the a", "the b", "the c"} and not any(row.members for row in apart.values())
    count_once(books)
    assert books.read(read_counts_once, OWNER)
    together = board(books)
    assert set(together) == {"the b", "the c"}, "the name of the node with most rollouts"
    row, a, b = together["the b"], apart["the a"], apart["the b"]
    assert (row.node, row.members, row.rollouts, row.tokens) == ("b", 2, 6, a.tokens + b.tokens)
    assert (row.rank, row.steps, row.longest_streak) == (1, 3, 2) and isclose(row.recent, a.recent + b.recent)
    assert row.work.trained_rollouts == 6 and row.share == pytest.approx(6 / 8)
    assert (row.first_day, row.last_day) == (0, 1)


def test_apart_again_all_is_as_before(books: Store) -> None:
    before = board(books)
    count_once(books)
    count_once(books, counts_once=False)
    assert board(books) == before and not books.read(read_counts_once, OWNER)


def test_new_work_counts_at_once_as_if_it_were_counted_again(books: Store, records: Any) -> None:
    count_once(books)
    books.apply(records.one_step(5, lease_id=9, group_id=9, node_id="b"), now=DAY_S + 1)
    books.count_all()
    grown = board(books)
    # The new owner only marks the old one for a new count, which must change nothing.
    books.write(owners.note_owner, "a", OTHER.hex())
    books.write(recount_owners)
    assert grown["the b"].rollouts == 8
    counted = board(books)["the b"]
    assert isclose(counted.recent, grown["the b"].recent)
    assert counted.steps == grown["the b"].steps and counted.longest_streak == grown["the b"].longest_streak


def test_a_node_that_changes_its_owner_takes_its_credit_along(books: Store) -> None:
    count_once(books)
    join(books, "b", OTHER)
    books.write(recount_owners)
    rows = board(books)
    assert set(rows) == {"the a", "the b", "the c"}
    assert (rows["the a"].members, rows["the a"].rollouts) == (1, 2) and rows["the b"].rollouts == 4
    join(books, "c", KEY)
    books.write(recount_owners)
    assert board(books)["the a"].rollouts == 4


def test_a_hidden_node_keeps_its_page_with_its_owner_s_rank(books: Store) -> None:
    count_once(books)
    found = books.read(read_credited_node, "a", DAY_S + 2)
    assert found is not None and (found[0], found[1].standing.rollouts, found[1].standing.rank) == ("a", 2, 1)
    credits = books.read(read_credits, ["a", "b", "c"])
    assert {node: (credit.rank, credit.num_ranked) for node, credit in credits.items()} == {
        "a": (1, 2),
        "b": (1, 2),
        "c": (2, 2),
    }
    assert credits["a"].share == pytest.approx(2 / 8)


def test_an_owner_without_nodes_is_on_no_board(books: Store) -> None:
    count_once(books)
    for node_id in ("a", "b"):
        join(books, node_id)
    books.write(recount_owners)
    assert set(board(books)) == {"the a", "the b", "the c"}


def test_few_owners_are_counted_at_a_time(books: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "RECOUNTED_AT_ONCE", 1)
    join(books, "c", OTHER)
    books.write(set_counts_once, OTHER.hex(), counts_once=True)
    books.write(set_counts_once, OWNER, counts_once=True)
    books.write(recount_owners)
    assert set(board(books)) == {"the b"}
    books.write(recount_owners)
    assert set(board(books)) == {"the b", "the c"}


def test_the_search_finds_an_owner_by_its_leading_node(books: Store) -> None:
    count_once(books)
    assert set(board(books, search="b")) == {"the b"}
    assert set(board(books, search="the a")) == set()
