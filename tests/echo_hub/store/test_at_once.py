from __future__ import annotations

from typing import Any

from sqlalchemy import literal, select

from echo_hub.store.at_once import rows_at_once
from echo_hub.store.database import open_to_read
from echo_hub.store.store import Store
from echo_hub.store.tables import events, nodes
from echo_shared.records.run import RunEvent, Severity

AWKWARD = """it's "so", \\ and \u202e\n[1, 2]"""


def test_rows_at_once_equal_the_query_result_in_order(store: Store) -> None:
    now = 1_764_000_000.123456
    for number, name in enumerate(["x", AWKWARD, "日本 🌊"]):
        node_id, seen = f"n{number}", now + number / 7
        store.node_seen(node_id=node_id, public_key=node_id.encode(), name=name, backend="", device="d", now=seen)
    query: Any = select(
        nodes.c.node_id, nodes.c.name, nodes.c.first_seen, nodes.c.banned_at, literal(2**53), nodes.c.cost_per_hour
    ).order_by(nodes.c.node_id.desc())
    with open_to_read(store.engine) as connection:
        plain = [tuple(row) for row in connection.execute(query)]
        at_once = [tuple(row) for row in rows_at_once(connection, query)]
    assert [row[0] for row in at_once] == ["n2", "n1", "n0"]
    for found, expected in zip(at_once, plain, strict=True):
        assert found[:2] + found[3:] == expected[:2] + expected[3:]
        assert abs(found[2] - expected[2]) < 2e-5


def test_json_and_boolean_columns_keep_their_types(store: Store) -> None:
    data = {"why": AWKWARD, "nodes": [1, 2.5, None], "of": {"a": True}}
    said = RunEvent(at=7.5, kind="ban", severity=Severity.INFO, subject="n", text=AWKWARD, data=data)
    store.apply([], 8.0, [said])
    query: Any = select(events.c.data, events.c.at, (events.c.number > 0).label("is_numbered"))
    with open_to_read(store.engine) as connection:
        (row,) = rows_at_once(connection, query)
        assert row == connection.execute(query).one()
    assert (row.data, row.is_numbered) == (data, True)


def test_there_may_be_none(store: Store) -> None:
    with open_to_read(store.engine) as connection:
        assert list(rows_at_once(connection, select(nodes.c.node_id))) == []
