from __future__ import annotations

from math import isclose
from typing import Any

import pytest

from echo_hub.store.board import read_board, read_credited_node
from echo_hub.store.credits import read_credits
from echo_hub.store.elsewhere import read_run_credit, take_in
from echo_hub.store.owners import read_counts_once, read_is_owned, read_owned, read_owned_ids, set_counts_once
from echo_hub.store.store import Store
from echo_shared.records.credit import BoardQuery, CreditStanding
from echo_shared.records.run_credit import NodeCredit, RunCredit

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
    """Nodes a, b and c with one, two and one trained steps of two rollouts, on two days. Owner of a and b: KEY."""
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


def test_an_owner_s_nodes_are_listed_with_their_credit(books: Store) -> None:
    join(books, "a", KEY, at=9.0)
    assert [(node.node_id, node.rollouts) for node in books.read(read_owned, OWNER)] == [("a", 2), ("b", 4)]
    assert books.read(read_owned_ids, OWNER) == {"a", "b"} and books.read(read_owned, OTHER.hex()) == ()
    assert books.read(read_is_owned, "a", OWNER)
    assert not books.read(read_is_owned, "c", OWNER) and not books.read(read_is_owned, "stranger", OWNER)


def test_an_owner_may_be_counted_once(books: Store) -> None:
    apart = board(books)
    assert set(apart) == {"the a", "the b", "the c"} and not any(row.members for row in apart.values())
    count_once(books)
    assert books.read(read_counts_once, OWNER)
    together = board(books)
    assert set(together) == {"the b", "the c"}, "the name of the node with most rollouts"
    row, a, b = together["the b"], apart["the a"], apart["the b"]
    assert (row.node, row.members, row.rollouts, row.tokens) == ("b", 2, 6, a.tokens + b.tokens)
    assert (row.rank, row.streak_days, row.longest_streak) == (1, 2, 2) and isclose(row.recent, a.recent + b.recent)
    assert row.work.trained_rollouts == 6 and row.share == pytest.approx(6 / 8)
    assert (row.first_day, row.last_day) == (0, 1)
    found = books.read(read_board, BoardQuery(), DAY_S + 2)
    assert found.num_ranked == found.num_found == 2


def test_the_streak_is_that_of_the_node_that_worked_last(books: Store, records: Any) -> None:
    join(books, "c", KEY)
    books.apply(records.one_step(5, lease_id=9, group_id=9, node_id="c"), now=3 * DAY_S)
    books.count_all()
    count_once(books)
    (row,) = board(books).values()
    assert (row.streak_days, row.longest_streak, row.last_day) == (1, 2, 3)


def test_apart_again_all_is_as_before(books: Store) -> None:
    before = board(books)
    count_once(books)
    count_once(books)
    count_once(books, counts_once=False)
    assert board(books) == before and not books.read(read_counts_once, OWNER)


def test_new_and_imported_credit_counts_at_once(books: Store, records: Any) -> None:
    count_once(books)
    books.apply(records.one_step(5, lease_id=9, group_id=9, node_id="b"), now=DAY_S + 1)
    books.count_all()
    assert board(books)["the b"].rollouts == 8
    said = RunCredit(
        run_id="s",
        run_name="S",
        hub_key=bytes(32).hex(),
        issued_at="2026-01-01T00:00:00Z",
        nodes=(NodeCredit(node_id="a", node_name="a", rollouts=5, tokens=7),),
    )
    books.write(take_in, said, now=2.0)
    assert board(books)["the b"].elsewhere_rollouts == 5


def test_a_node_that_changes_its_owner_takes_its_credit_along(books: Store) -> None:
    count_once(books)
    join(books, "b", OTHER)
    rows = board(books)
    assert set(rows) == {"the a", "the b", "the c"}
    assert (rows["the a"].members, rows["the a"].rollouts) == (1, 2) and rows["the b"].rollouts == 4
    join(books, "c", KEY)
    assert board(books)["the a"].rollouts == 4


def test_an_owner_without_nodes_is_forgotten(books: Store) -> None:
    count_once(books)
    join(books, "a")
    assert books.read(read_counts_once, OWNER)
    join(books, "b", OTHER)
    assert not books.read(read_counts_once, OWNER)
    assert set(board(books)) == {"the a", "the b", "the c"}


def test_keys_without_credit_are_no_part_of_an_owner_s_entry(books: Store) -> None:
    for number in range(5):
        join(books, f"idle{number}", KEY)
    count_once(books)
    assert board(books)["the b"].members == 2


def test_a_hidden_node_keeps_its_page_with_its_owner_s_rank(books: Store) -> None:
    count_once(books)
    found = books.read(read_credited_node, "a", DAY_S + 2)
    assert found is not None and (found[0], found[1].standing.rollouts, found[1].standing.rank) == ("a", 2, 1)
    credits = books.read(read_credits, ["a", "b", "c", "none"])
    assert {node: (credit.rank, credit.num_ranked) for node, credit in credits.items()} == {
        "a": (1, 2),
        "b": (1, 2),
        "c": (2, 2),
        "none": (None, 2),
    }
    assert credits["a"].share == pytest.approx(2 / 8)


def test_an_export_names_nodes_also_if_their_owner_counts_once(books: Store) -> None:
    run = {"run_id": "r", "run_name": "R", "hub_key": bytes(32)}
    before = books.read(read_run_credit, **run, now=2.0)
    count_once(books)
    assert books.read(read_run_credit, **run, now=2.0) == before
    assert [(node.node_id, node.rollouts) for node in before.nodes] == [("a", 2), ("b", 4), ("c", 2)]


def test_the_search_finds_an_owner_by_its_leading_node(books: Store) -> None:
    count_once(books)
    assert set(board(books, search="b")) == {"the b"}
    assert set(board(books, search="the a")) == set()
