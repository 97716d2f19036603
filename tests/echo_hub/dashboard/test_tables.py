from __future__ import annotations

from echo_hub.dashboard.tables import Column, headings, known_sort, sort_rows

COLUMNS: tuple[Column[tuple[str, int]], ...] = (
    Column(key="name", title="Name", order=lambda row: row[0]),
    Column(key="size", title="Size", order=lambda row: row[1], descending=True, css="number"),
)
ROWS = (("b", 2), ("c", 1), ("a", 3))


def test_a_column_sorts_in_its_own_direction_and_back() -> None:
    assert [name for name, _ in sort_rows(ROWS, COLUMNS, "name")] == ["a", "b", "c"]
    assert [name for name, _ in sort_rows(ROWS, COLUMNS, "-name")] == ["c", "b", "a"]
    assert [size for _, size in sort_rows(ROWS, COLUMNS, "size")] == [3, 2, 1]
    assert [size for _, size in sort_rows(ROWS, COLUMNS, "-size")] == [1, 2, 3]


def test_an_unknown_column_changes_nothing() -> None:
    assert sort_rows(ROWS, COLUMNS, "--size") == ROWS
    assert sort_rows(ROWS, COLUMNS, "<script>") == ROWS
    assert sort_rows(ROWS, COLUMNS, "") == ROWS


def test_a_heading_links_to_its_order_or_to_the_reverse() -> None:
    name, size = headings(COLUMNS, "size", kept={"node": "a b"}, anchor="table")
    assert (name.href, name.sorted) == ("?node=a+b&sort=name#table", "")
    assert (size.href, size.sorted) == ("?node=a+b&sort=-size#table", "descending")
    _, reverse = headings(COLUMNS, "-size", kept={}, anchor="table")
    assert (reverse.href, reverse.sorted) == ("?sort=size#table", "ascending")


def test_only_a_columns_name_is_a_known_sort() -> None:
    assert [known_sort(COLUMNS, sort) for sort in ("size", "-size", "--size", "x")] == ["size", "-size", "", ""]
