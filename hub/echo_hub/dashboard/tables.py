"""Tables with headings that are links for sorting. So sorting needs no script, and each order of a table has its own
address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """A column of a sortable table. `key` is the column's name in the page address; `order` returns a row's sort key
    for ascending order. If `descending`, the largest value comes first.
    """

    key: str
    title: str
    order: Callable[[Row], Any]
    descending: bool = False
    css: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The heading of a column for the template. `sorted` is the value of aria-sort; "" if the table is not sorted by
    this column."""

    title: str
    href: str
    sorted: str
    css: str


def known_sort(columns: Iterable[Column[Row]], requested: str) -> str:
    """Return `requested` if it names a column, else ""."""
    return requested if requested.removeprefix("-") in {column.key for column in columns} else ""


def sort_rows(rows: Iterable[Row], columns: Iterable[Column[Row]], requested: str) -> tuple[Row, ...]:
    """Return the rows sorted by the column `requested`; "-key" reverses the order. If the column is unknown, keep the
    given order."""
    for column in columns:
        if requested.removeprefix("-") == column.key:
            return tuple(sorted(rows, key=column.order, reverse=column.descending != requested.startswith("-")))
    return tuple(rows)


def headings(columns: Iterable[Column[Row]], requested: str, *, kept: Mapping[str, str], anchor: str) -> list[Heading]:
    """Return headings with links. A link sorts the rows by its column; the sorted column's link reverses the order.

    `kept` holds the other query fields of the page address, which the links repeat.
    """
    result = []
    for column in columns:
        here, reverse = requested.removeprefix("-") == column.key, requested.startswith("-")
        target = f"-{column.key}" if here and not reverse else column.key
        direction = "descending" if column.descending != reverse else "ascending"
        query = urlencode({**kept, "sort": target})
        heading = Heading(
            title=column.title, href=f"?{query}#{anchor}", sorted=direction if here else "", css=column.css
        )
        result.append(heading)
    return result


def page_links(asked: Mapping[str, str], *, after: int, limit: int, shown: int, found: int) -> tuple[str, str]:
    """Return the addresses of the previous and the next page; "" if there is no such page.

    `asked` holds the other query fields of the page address. This page skips `after` rows and shows `shown` rows (at
    most `limit`) of all `found` rows.
    """

    def link(after: int) -> str:
        return f"?{urlencode({**asked, **({'after': after} if after else {})})}#table"

    behind = after + shown
    before = link(max(after - limit, 0)) if after else ""
    return before, link(behind) if shown and behind < found else ""
