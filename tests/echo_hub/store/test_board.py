"""The leaderboard; the database itself ranks, sorts, searches and pages it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from sqlalchemy import insert, text

from echo_hub.store.board import find_node, read_board, read_credited_node, read_public_receipt, read_shares
from echo_hub.store.reading import read_receipts
from echo_hub.store.store import Store
from echo_hub.store.tables import credit, nodes
from echo_shared.records.credit import BOARD_ORDERS, BoardQuery
from echo_shared.wire.messages import ReceiptState

DAY = 86_400.0
NAMES = {"a1": "zoe", "b2": "Zoe", "c3": "100%_sure", "d4": "apple", "e5": "apple", "f6": "\u202eevil"}


def join(store: Store, node_id: str, name: str, now: float = 1.0) -> None:
    store.node_seen(node_id=node_id, public_key=bytes(32), name=name, backend="torch", device="cpu", now=now)


@pytest.fixture
def books(store: Store, records: Any) -> Store:
    """Return a store in which node a1 has two steps, including the newest; every other node has one, and node "idle"
    none.
    """
    for number, (node_id, name) in enumerate(NAMES.items()):
        join(store, node_id, name, now=10.0 - number)
    join(store, "idle", "idle")
    for step, node_id in enumerate([*NAMES, "a1"], start=1):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id=node_id), now=step * DAY)
    return store


def names(books: Store, **wanted: Any) -> list[str]:
    return [row.node for row in books.read(read_board, BoardQuery(**wanted), 8 * DAY).rows]


def test_ranks_are_by_rollouts_then_by_name_and_id(books: Store) -> None:
    board = books.read(read_board, BoardQuery(), 8 * DAY)
    assert [(row.rank, row.node) for row in board.rows] == [
        (1, "a1"),
        (2, "c3"),
        (3, "b2"),
        (4, "d4"),
        (5, "e5"),
        (6, "f6"),
    ]
    assert (board.num_found, board.num_ranked, board.has_elsewhere) == (6, 6, False)
    assert sum(row.share for row in board.rows) == pytest.approx(1.0)
    assert board.rows[0].name == "zoe" and board.rows[0].rollouts == 4


@pytest.mark.parametrize("order", BOARD_ORDERS)
def test_every_order_can_be_turned_round(books: Store, order: Any) -> None:
    there = books.read(read_board, BoardQuery(order=order), 8 * DAY).rows
    back = books.read(read_board, BoardQuery(order=order, reverse=True), 8 * DAY).rows
    assert {row.node for row in there} == {row.node for row in back}

    def key(row: Any) -> Any:
        return {
            "rank": row.rank,
            "name": row.name.lower(),
            "elsewhere": -row.all_rollouts,
            "seen": -row.last_seen,
            "streak": -row.streak_days,
        }.get(order) or -getattr(row, order, 0)

    assert [key(row) for row in there] == sorted(key(row) for row in there)
    assert [key(row) for row in back] == sorted((key(row) for row in back), reverse=True)


def test_pages_are_cut_by_the_database(books: Store) -> None:
    cut = [names(books, after=after, limit=2) for after in (0, 2, 4, 6)]
    assert cut == [["a1", "c3"], ["b2", "d4"], ["e5", "f6"], []]


def test_a_search_is_for_a_part_of_the_name_or_the_start_of_an_id(books: Store) -> None:
    assert names(books, search="ZO") == ["a1", "b2"]
    assert names(books, search="e5") == ["e5"]
    assert names(books, search="0%_") == ["c3"], "SQL wildcards are matched as plain characters"
    assert names(books, search="%") == ["c3"] and names(books, search="\\") == []
    board = books.read(read_board, BoardQuery(search="apple", limit=1), 8 * DAY)
    assert (len(board.rows), board.num_found, board.num_ranked, board.rows[0].rank) == (1, 2, 6, 4)


def test_streaks_and_averages_are_as_of_now(books: Store) -> None:
    (soon,) = books.read(read_board, BoardQuery(search="a1"), 8 * DAY).rows
    (late,) = books.read(read_board, BoardQuery(search="a1"), 15 * DAY).rows
    assert (soon.streak_days, late.streak_days, late.longest_streak) == (1, 0, 1)
    assert late.recent == pytest.approx(soon.recent / 2)


def test_a_node_is_found_by_the_start_of_its_id(store: Store, books: Store) -> None:
    found = books.read(read_credited_node, "b", 8 * DAY)
    assert found is not None and found[0] == "b2"
    assert [(day.day, day.rollouts) for day in found[1].days] == [(2, 2)]
    assert found[1].standing.work.trained_rollouts == 2 and found[1].standing.steps == 1
    with store.engine.connect() as connection:
        assert find_node(connection, "%") is None and find_node(connection, "zz") is None
    assert books.read(read_credited_node, "idle", 8 * DAY) is None


def test_shares_are_of_the_steps_it_took_part_in(books: Store) -> None:
    assert {step: share.share for step, share in books.read(read_shares, "a1", 1).items()} == {0: 1.0, 6: 1.0}
    wide = books.read(read_shares, "a1", 4)
    assert {step: (share.rollouts, round(share.share, 3)) for step, share in wide.items()} == {
        0: (2, 0.25),
        1: (2, 0.333),
    }


def test_a_public_receipt_equals_the_one_its_node_gets(store: Store, books: Store) -> None:
    found = books.read(read_public_receipt, 1, 0)
    (told,) = store.read(read_receipts, "a1", ["1-0"])
    assert found is not None and (found.state, found.checked) == (told.state, told.checked)
    assert (found.state, found.node, found.name, found.step) == (ReceiptState.TRAINED, "a1", "zoe", 1)
    assert (
        books.read(read_public_receipt, 99, 0)
        is books.read(read_public_receipt, 2**63, 0)
        is books.read(read_public_receipt, 1, 2**31)
        is None
    )


def test_five_thousand_nodes_are_ranked_in_a_moment(store: Store) -> None:
    zero = dict.fromkeys(("steps", "elsewhere_rollouts", "elsewhere_tokens"), 0)
    ids = [f"{number * 2_654_435_761 % 2**40:010x}{number:010x}" for number in range(5_000)]
    known = {"public_key": "", "backend": "b", "device": "d", "first_seen": 1.0, "last_seen": 1.0}
    with store.engine.begin() as connection:
        connection.execute(insert(nodes), [{"node_id": one, "name": one[::-1], **known} for one in ids])
        connection.execute(
            insert(credit),
            [
                {"holder": one, "kind": "node", "rollouts": 200 + i % 97, "tokens": i, "recent": 2_900.0 + i / 1e4}
                | {"streak_days": i % 9, "longest_streak": 9, "first_day": 1, "last_day": 2, **zero}
                for i, one in enumerate(ids)
            ],
        )
        began = time.perf_counter()
        for order in BOARD_ORDERS:
            page = read_board(connection, BoardQuery(order=order, search="7", after=50, limit=100), 2 * DAY)
            assert len(page.rows) == 100
        assert (time.perf_counter() - began) / len(BOARD_ORDERS) < 0.5


def test_a_page_looks_at_no_receipt(store: Store, books: Store) -> None:
    if store.engine.dialect.name != "sqlite":
        return
    from sqlalchemy import event

    asked: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda _c, _u, statement, *_: asked.append(statement))
    books.read(read_board, BoardQuery(search="zoe"), 8 * DAY)
    books.read(read_credited_node, "a1", 8 * DAY)
    books.read(read_shares, "a1", 2)
    assert asked and not [statement for statement in asked if "rollouts." in statement and "FROM rollouts" in statement]
    with store.engine.connect() as connection:
        plan = connection.execute(
            text("EXPLAIN QUERY PLAN SELECT * FROM credit_steps WHERE holder = 'a1'"),
        ).all()
    assert "SEARCH" in json.dumps([row[3] for row in plan])
