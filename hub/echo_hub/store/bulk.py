"""Execute one statement for many rows with a single compilation; select rows by many keys; change rollouts.

SQLAlchemy looks up the names, defaults and types of every row's parameters, which takes several times as long as SQLite
needs for the row. Here they are looked up once for each statement. Values are still converted by the type of their
column.

SQLite gets many rows in one statement: its driver releases and retakes Python's GIL for each execution, and in a busy
hub each retake waits for other threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Dialect, Insert, Update, func, literal, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.dml import Delete

from echo_shared.errors import LocalProtocolError

T = TypeVar("T")

_KEPT: Final = 64
MOST_PARAMETERS: Final = 900
"""Largest number of parameters in one statement; SQLite before 3.32 allows 999. The number of rows in a statement is
always a power of two, so that few different statements are compiled.
"""


def among(connection: Connection, column: ColumnElement[T], values: Iterable[T]) -> ColumnElement[bool]:
    """Return the condition that a column's value is one of `values`, which are numbers or texts.

    All values are passed as one parameter. With one parameter for each value, SQLAlchemy and PostgreSQL's driver needed
    several times as long for 250 parameters as the database needed for the rows.
    """
    if connection.dialect.name == "sqlite":
        each = func.json_each(literal(json.dumps(list(values)))).table_valued("value")
        return column.in_(select(each.c.value))
    return column == func.any(literal(list(values), ARRAY(column.type)))


def execute_many(connection: Connection, statement: Insert | Update | Delete, rows: Sequence[Mapping[str, Any]]) -> int:
    """Execute the statement for each row, and return how many stored rows changed.

    `rows` is not empty, and all rows have the same names. Pass the same statement object each time: its compiled form
    is cached. An update must name each stored row at most once.
    """
    many = _many(statement, connection.dialect, tuple(rows[0]))
    parameters = [many.parameters(row) for row in rows]
    if many.text_of is None:
        return connection.exec_driver_sql(many.text, parameters).rowcount
    changed = 0
    for part in _parts(len(rows), most=(MOST_PARAMETERS - len(many.first)) // len(parameters[0])):
        values = chain(many.first, *parameters[part])
        changed += connection.exec_driver_sql(many.text_of(part.stop - part.start), tuple(values)).rowcount
    return changed


def _parts(number: int, *, most: int) -> Iterator[slice]:
    """Split `number` rows into slices. Each length is a power of two, at most `most`."""
    start = 0
    while start < number:
        size = 1 << (min(number - start, most).bit_length() - 1)
        yield slice(start, start + size)
        start += size


@dataclass(frozen=True, slots=True)
class _Many:
    text: str
    fixed: Mapping[str, Any]
    processors: Mapping[str, Callable[[Any], Any]]
    in_order: Callable[[Mapping[str, Any]], Any] | None
    """Function that returns a row's values in the driver's positional order; None if the driver takes parameters by
    name.
    """
    text_of: Callable[[int], str] | None = None
    """Function that returns the statement's text for N rows at once; None if the driver gets the rows with
    `executemany`.
    """
    first: Sequence[Any] = ()
    """Parameter values that come before the values of the rows, in the driver's order."""

    def parameters(self, row: Mapping[str, Any]) -> Any:
        values = {**self.fixed, **row}
        for name, process in self.processors.items():
            values[name] = process(values[name])
        return values if self.in_order is None else self.in_order(values)


@lru_cache(_KEPT)
def _many(statement: Insert | Update | Delete, dialect: Dialect, names: tuple[str, ...]) -> _Many:
    """Compile a statement for rows with these parameter names. For an update, `names` are the
    names of its bindparams.
    """
    compiled = statement.compile(dialect=dialect, column_keys=list(names) if statement.is_insert else None)
    binds = {name: compiled.binds[name] for name in compiled.params}
    found = {name: bind.type.dialect_impl(dialect).bind_processor(dialect) for name, bind in binds.items()}
    processors = {name: process for name, process in found.items() if process is not None}
    fixed = {name: value for name, value in compiled.params.items() if name not in names}
    text, places = str(compiled), compiled.positiontup or []
    if not dialect.positional:
        return _Many(text, fixed, processors, None)
    many = _Many(text, fixed, processors, _getter(places))
    if dialect.name != "sqlite" or statement.is_delete:
        return many
    if statement.is_insert:
        return replace(many, text_of=cache(_insert_of(text, len(places))))
    first = tuple(processors[name](value) if name in processors else value for name, value in fixed.items())
    of_rows = {name: process for name, process in processors.items() if name in names}
    text_of = cache(_update_of(text, places, names=names, fixed=tuple(fixed)))
    return replace(many, fixed={}, processors=of_rows, in_order=_getter(names), text_of=text_of, first=first)


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    return itemgetter(*names) if len(names) > 1 else lambda values: (values[names[0]],)


def _insert_of(text: str, num_columns: int) -> Callable[[int], str]:
    row = f"({', '.join('?' * num_columns)})"
    before, after = text.split(f" VALUES {row}")
    return lambda number: f"{before} VALUES {', '.join([row] * number)}{after}"


def _update_of(text: str, places: Sequence[str], *, names: Sequence[str], fixed: Sequence[str]) -> Callable[[int], str]:
    """Return a function that makes the text of an UPDATE for N rows.

    `text` has one "?" for each of `places`. `names` are the parameters of each row; `fixed` are the parameters that all
    rows share.
    """
    written = {name: f"?{number}" for number, name in enumerate(fixed, 1)}
    written |= {name: f"given.column{number}" for number, name in enumerate(names, 1)}
    pieces = text.split("?")
    filled = "".join([pieces[0], *(written[name] + piece for name, piece in zip(places, pieces[1:], strict=True))])
    before, where = filled.split(" WHERE ")

    def of(number: int) -> str:
        starts = range(len(fixed) + 1, len(fixed) + 1 + number * len(names), len(names))
        rows = [f"({', '.join(f'?{start + place}' for place in range(len(names)))})" for start in starts]
        return f"{before} FROM (VALUES {', '.join(rows)}) AS given WHERE {where}"

    return of


Rows = list[dict[str, Any]]


def key_of(rollout_id: str) -> tuple[int, int]:
    lease_id, _, index = rollout_id.partition("-")
    return int(lease_id), int(index)


def rows_of(rollout_ids: Iterable[str], **values: Any) -> Rows:
    """Return one parameter row for each rollout: its lease as "lease", its index as "at", and these values."""
    return [{"lease": lease, "at": index, **values} for lease, index in map(key_of, rollout_ids)]


def change(connection: Connection, statement: Update, rows: Rows, what: str) -> None:
    """Execute the statement for each row. Raises LocalProtocolError if a row changes nothing."""
    check_changed(execute_many(connection, statement, rows), len(rows), what)


def check_changed(changed: int, wanted: int, what: str) -> None:
    """Raise LocalProtocolError unless an update has changed the wanted number of rollouts."""
    if changed != wanted:
        raise LocalProtocolError(
            "The coordinator's records do not fit the store; no record of this turn was written.",
            got=f"{changed} of {wanted} rollouts could be {what}",
        )
