"""Column types and index options that the tables of both kinds of database use."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Dialect,
    TextClause,
    TypeDecorator,
)


class Unsigned64(TypeDecorator[int]):
    """0 .. 2**64 - 1 in a signed 64-bit column, by two's complement."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return value if value is None or value < 2**63 else value - 2**64

    def process_result_value(self, value: Any | None, dialect: Dialect) -> int | None:
        return None if value is None else int(value) % 2**64


def only_where(condition: ColumnElement[bool] | TextClause) -> dict[str, Any]:
    """Return the keyword arguments of an index that holds only the rows for which the condition is true."""
    return {"sqlite_where": condition, "postgresql_where": condition}
