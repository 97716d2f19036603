"""Tables that readers sort by following a link, so sorting needs no script and a sorted table has its own address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """A column. `key` names it in the address; `order` is its ascending sort key. A `descending` column shows its
    largest value first.
    """

    key: str
    title: str
    order: Callable[[Row], Any]
    descending: bool = False
    css: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A column's heading for the template. `sorted` is the value of aria-sort, empty for all columns but one."""

    title: str
    href: str
    sorted: str
    css: str


def known_sort(columns: Iterable[Column[Row]], requested: str) -> str:
    """Return `requested` if it names a column, else ""."""
    return requested if requested.removeprefix("-") in {column.key for column in columns} else ""


def sort_rows(rows: Iterable[Row], columns: Iterable[Column[Row]], requested: str) -> tuple[Row, ...]:
    """Sort rows by the column `requested`; "-key" reverses the order. An unknown column leaves the rows as they are."""
    for column in columns:
        if requested.removeprefix("-") == column.key:
            return tuple(sorted(rows, key=column.order, reverse=column.descending != requested.startswith("-")))
    return tuple(rows)


def headings(columns: Iterable[Column[Row]], requested: str, *, kept: Mapping[str, str], anchor: str) -> list[Heading]:
    """Return headings that link to their column's order, or to its reverse if the rows have that order.

    `kept` holds the address's other fields.
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
    """Return the addresses of the previous and next page; "" stands for a missing page.

    `asked` holds the address's other fields. `after` rows are skipped, `shown` of at most `limit` are on this page, and
    `found` exist.
    """

    def link(after: int) -> str:
        return f"?{urlencode({**asked, **({'after': after} if after else {})})}#table"

    behind = after + shown
    before = link(max(after - limit, 0)) if after else ""
    return before, link(behind) if shown and behind < found else ""
