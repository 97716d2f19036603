"""Bulk writes, which call SQLAlchemy once per statement and not once per row, must store what SQLAlchemy would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from sqlalchemy import Connection, bindparam, create_engine, delete, event, insert, select, update

from echo_hub.store.bulk import MOST_PARAMETERS, among, execute_many
from echo_hub.store.database import open_to_write
from echo_hub.store.store import Store
from echo_hub.store.tables import groups, metadata, payloads, rollouts, team_members
from echo_hub.store.writing import _RECEIVE
from echo_shared.wire.messages import FinishReason, ReceiptState

ROWS = [
    {
        "lease_id": lease_id,
        "index": 0,
        "completion_ids": bytes([lease_id]),
        "behavior_logprobs": b"",
        "finish_reason": FinishReason.STOP,
        "sampling_s": 0.5,
        "spans": spans,
    }
    for lease_id, spans in ((1, [["n1", 3, 2]]), (2, None))
]
NEW = insert(payloads)
SPANS = (
    update(payloads)
    .where(payloads.c.lease_id == bindparam("lease"), payloads.c.finish_reason == FinishReason.STOP)
    .values(spans=bindparam("new", type_=payloads.c.spans.type), sampling_s=0.25)
)
GONE = delete(payloads).where(payloads.c.lease_id == bindparam("lease"))


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    metadata.create_all(engine, tables=[payloads, rollouts])
    with engine.begin() as opened:
        yield opened


def stored(connection: Connection) -> list[tuple[object, ...]]:
    rows = connection.execute(select(payloads).order_by(payloads.c.lease_id))
    return [tuple(row) for row in rows]


def test_rows_are_as_sqlalchemy_would_have_written_them(connection: Connection) -> None:
    connection.execute(NEW, ROWS)
    expected = stored(connection)
    assert execute_many(connection, GONE, [{"lease": 1}, {"lease": 2}]) == 2
    assert stored(connection) == []
    execute_many(connection, NEW, ROWS)
    assert stored(connection) == expected


def test_bulk_updates_convert_column_types_and_count_changed_rows(connection: Connection) -> None:
    execute_many(connection, NEW, ROWS)
    changed = execute_many(
        connection, SPANS, [{"lease": 1, "new": None}, {"lease": 2, "new": []}, {"lease": 3, "new": []}]
    )
    assert changed == 2, "lease 3 does not exist"
    found = connection.execute(select(payloads.c.spans, payloads.c.sampling_s).order_by(payloads.c.lease_id))
    assert [tuple(row) for row in found] == [(None, 0.25), ([], 0.25)]


def test_columns_that_no_row_names_have_their_defaults(connection: Connection) -> None:
    row = {
        "lease_id": 1,
        "index": 0,
        "node_id": "n",
        "group_id": 1,
        "policy_version": 0,
        "leased_at": 1.0,
        "deadline": 2.0,
        "state": ReceiptState.LEASED,
    }
    execute_many(connection, insert(rollouts), [row])
    assert connection.execute(select(rollouts.c.turn, rollouts.c.checked)).one() == (0, "no")


def test_rows_are_sent_together_and_none_is_left(connection: Connection) -> None:
    """Statements hold a power of two of rows, so that few different statements occur, and at most as many parameters as
    SQLite allows.
    """
    number = 300
    sent: list[int] = []
    event.listen(connection, "before_cursor_execute", lambda *arguments: sent.append(len(arguments[3])))
    execute_many(connection, NEW, [{**ROWS[0], "lease_id": lease_id} for lease_id in range(number)])
    assert sent == [7 * rows for rows in (128, 128, 32, 8, 4)]
    sent.clear()
    rows = [{"lease": lease_id, "new": [["n", lease_id, 1]]} for lease_id in range(number)]
    assert execute_many(connection, SPANS, rows) == number
    assert max(sent) <= MOST_PARAMETERS and sum(sent) == 2 * number + 2 * len(sent), (
        "the value that is equal in all rows is sent once"
    )
    found = connection.execute(select(payloads.c.lease_id, payloads.c.spans).order_by(payloads.c.lease_id))
    assert [tuple(row) for row in found] == [(row["lease"], row["new"]) for row in rows]


def test_rows_that_are_changed_are_found_by_their_keys(connection: Connection) -> None:
    plans: list[str] = []

    def note(of: Connection, cursor: object, statement: str, parameters: Sequence[object], *_: object) -> None:
        if statement.startswith("UPDATE"):
            plan = of.connection.driver_connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.extend(row[-1] for row in plan)

    event.listen(connection, "before_cursor_execute", note)
    execute_many(connection, _RECEIVE, [{"lease": 1, "at": 0, "new_num_tokens": 1, "new_received_at": 1.0}] * 2)
    assert any("SEARCH rollouts USING PRIMARY KEY (lease_id=? AND index=?)" in plan for plan in plans), plans


def test_many_keys_are_one_parameter(store: Store) -> None:
    """Keys of any number and type fill one parameter, so that the statement's text stays the same."""
    told: list[int] = []
    event.listen(store.engine, "before_cursor_execute", lambda *heard: told.append(len(heard[3])))
    ids = [f"{number:064x}" for number in range(300)]
    with open_to_write(store.engine) as connection:
        connection.execute(insert(groups), [{"group_id": number, "seed": 1, "opened_at": 1.0} for number in range(9)])
        connection.execute(insert(team_members), {"node_id": ids[7], "team_id": 1, "joined_at": 1.0})
        told.clear()
        of_groups = select(groups.c.group_id).order_by(groups.c.group_id)
        assert connection.scalars(of_groups.where(among(connection, groups.c.group_id, (3, 5, 99)))).all() == [3, 5]
        assert connection.scalars(of_groups.where(among(connection, groups.c.group_id, ()))).all() == []
        of_teams = select(team_members.c.node_id)
        assert connection.scalars(of_teams.where(among(connection, team_members.c.node_id, ids))).all() == [ids[7]]
    assert set(told[:3]) == {1}
