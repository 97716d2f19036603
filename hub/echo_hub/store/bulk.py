"""One statement for many rows, compiled once; and for many keys.

SQLAlchemy makes the parameters of every row anew: of each it asks the names, defaults and types of its statement, which
takes several times as long as SQLite takes for the row. Here that is asked once for each statement; what becomes of a
value is still its column's type to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Dialect, Insert, Update, func, literal
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.dml import Delete

T = TypeVar("T")

_KEPT: Final = 64


def among(connection: Connection, column: ColumnElement[T], values: Iterable[T]) -> ColumnElement[bool]:
    """Whether the column's is one of these. To PostgreSQL they go as one array: of each parameter its driver makes so
    much that 250 took it several times what the server took for their rows."""
    if connection.dialect.name == "sqlite":
        return column.in_(list(values))
    return column == func.any(literal(list(values), ARRAY(column.type)))


def execute_many(connection: Connection, statement: Insert | Update | Delete, rows: Sequence[Mapping[str, Any]]) -> int:
    """Executes the statement for each row, one or more, all of the same names; how many rows it has changed. Give the
    same statement object again and again."""
    many = _many(statement, connection.dialect, tuple(rows[0]))
    return connection.exec_driver_sql(many.text, [many.parameters(row) for row in rows]).rowcount


@dataclass(frozen=True, slots=True)
class _Many:
    text: str
    fixed: Mapping[str, Any]
    """What is the same for every row."""
    processors: Mapping[str, Callable[[Any], Any]]
    in_order: Callable[[Mapping[str, Any]], Any] | None
    """The values as the driver takes them by place; None: it takes them by name."""

    def parameters(self, row: Mapping[str, Any]) -> Any:
        values = {**self.fixed, **row}
        for name, process in self.processors.items():
            values[name] = process(values[name])
        return values if self.in_order is None else self.in_order(values)


@lru_cache(_KEPT)
def _many(statement: Insert | Update | Delete, dialect: Dialect, names: tuple[str, ...]) -> _Many:
    """`names`: a row's. Of an update they are those of its parameters, as in SQLAlchemy."""
    compiled = statement.compile(dialect=dialect, column_keys=list(names) if statement.is_insert else None)
    binds = {name: compiled.binds[name] for name in compiled.params}
    found = {name: bind.type.dialect_impl(dialect).bind_processor(dialect) for name, bind in binds.items()}
    processors = {name: process for name, process in found.items() if process is not None}
    fixed = {name: value for name, value in compiled.params.items() if name not in names}
    in_order: Callable[[Mapping[str, Any]], Any] | None = None
    if dialect.positional:
        places = compiled.positiontup or []
        in_order = itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)
    return _Many(str(compiled), fixed, processors, in_order)
