"""Many rows as one. With each row that SQLite hands over, a thread asks for the interpreter anew, which it gets late
from a hub that is busy: 20,000 rows then take seconds. PostgreSQL has them all before the first is looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, func, select


def rows_at_once(connection: Connection, query: Select[Any]) -> Sequence[Sequence[Any]]:
    """The query's rows, in its order. Its columns are texts, whole numbers and floats, these good to 15 digits: of a
    time, to ten microseconds."""
    if connection.dialect.name != "sqlite":
        return connection.execute(query).all()
    rows = query.subquery()
    text = connection.scalar(select(func.json_group_array(func.json_array(*rows.c))))
    found: list[list[Any]] = json.loads(text or "[]")
    return found
