"""The live parts of a rendered page, their rows, and the difference between two renderings.

A template marks a live element with `data-live` and an id. The mark `data-live="rows"` is for elements whose children
are rows with own ids:

    <p id="facts" data-live>...</p>
    <tbody id="nodes" data-live="rows"><tr id="node-1">...</tr> <tr id="node-2">...</tr></tbody>

If an element of the first kind changes, it is sent in full. For an element of the second kind, only changed rows are
sent, and the order of ids if it changed. Live elements are never nested, and exist on their page in every state of the
run. Templates belong to the hub and escape their inputs, so every tag here was written by a template.

`<time data-ago>` shows an age. The browser updates it, so a different age does not count as a change.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_LIVE: Final = re.compile(r'<(\w+)\b[^>]*?\sdata-live(?:="(\w*)")?(?=[\s>])[^>]*>')
_ID: Final = re.compile(r'\sid="([^"]+)"')
_ROW: Final = re.compile(r"\s*(?=<(\w+))(<[^>]*>)")
_TITLE: Final = re.compile(r"<title>(.*?)</title>", re.DOTALL)
_COUNTED: Final = re.compile(r"(<time\b[^>]* data-ago[^>]*>)[^<]*")

Marks = Mapping[str, int]
"""Fingerprints of one rendering, valid only in this process. A key is the id of a live part, or "part/row" for a row.
The value is the hash of the part's or row's text; for a part with rows, the hash of its row ids in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A rendered page: the full text and its live parts."""

    text: str
    title: str
    parts: Mapping[str, str]
    """Inner HTML of each part without rows, by id."""
    rows: Mapping[str, Mapping[str, str]]
    """Full HTML of each row, in order, for parts with rows: keyed by part id, then by row id."""
    marks: Marks

    @property
    def revision(self) -> str:
        """Return an id that is equal for renderings with equal live parts."""
        return f"{hash(frozenset(self.marks.items())) & (2**64 - 1):016x}"


def rendering(text: str) -> Rendering:
    parts: dict[str, str] = {}
    rows: dict[str, Mapping[str, str]] = {}
    title = _TITLE.search(text)
    marks: dict[str, int] = {"": hash(title[1] if title else "")}
    for part, kind, inner in _live(text):
        assert part not in parts and part not in rows, f"two live parts have the id {part}"
        if kind == "rows":
            rows[part] = dict(_rows(inner))
            marks[part] = hash(tuple(rows[part]))
            marks |= {f"{part}/{row}": _mark(of_row) for row, of_row in rows[part].items()}
        else:
            parts[part] = inner
            marks[part] = _mark(inner)
    return Rendering(text=text, title=html.unescape(title[1]) if title else "", parts=parts, rows=rows, marks=marks)


def difference(seen: Marks, now: Rendering) -> dict[str, Any]:
    """Return the changes from the rendering with the fingerprints `seen` to `now`, as JSON values. If `seen` is empty,
    return everything.

    {"title": text, "parts": {part: HTML}, "rows": {part: {"changed": {row: HTML}, "order": [row, ...]}}}

    A key is present only if something under it has changed.
    """
    marks = now.marks
    news: dict[str, Any] = {}
    if seen.get("") != marks[""]:
        news["title"] = now.title
    parts = {part: inner for part, inner in now.parts.items() if seen.get(part) != marks[part]}
    if parts:
        news["parts"] = parts
    rows: dict[str, Any] = {}
    for part, of_part in now.rows.items():
        keys = ((row, f"{part}/{row}") for row in of_part)
        changed = {row: of_part[row] for row, key in keys if seen.get(key) != marks[key]}
        order = {"order": list(of_part)} if seen.get(part) != marks[part] else {}
        if changed or order:
            rows[part] = {"changed": changed, **order}
    if rows:
        news["rows"] = rows
    return news


def _live(text: str) -> Iterator[tuple[str, str, str]]:
    place = 0
    while opening := _LIVE.search(text, place):
        found = _ID.search(opening[0])
        assert found is not None, f"a live part without an id: {opening[0]}"
        place = _end_of(opening[1], text, opening.end())
        yield found[1], opening[2] or "", text[opening.end() : place]


def _end_of(tag: str, text: str, start: int) -> int:
    """Return the start of the closing tag of an element whose content begins at `start`."""
    depth = 1
    for found in re.compile(rf"<(/?){tag}\b").finditer(text, start):
        depth += -1 if found[1] else 1
        if not depth:
            return found.start()
    raise AssertionError(f"a live <{tag}> that does not end")


def _rows(inner: str) -> Iterator[tuple[str, str]]:
    place = 0
    while opening := _ROW.match(inner, place):
        found = _ID.search(opening[2])
        assert found is not None, f"a row without an id: {opening[2]}"
        place = inner.index(">", _end_of(opening[1], inner, opening.end())) + 1
        yield found[1], inner[opening.start(2) : place]
    assert not inner[place:].strip(), f"text outside rows in a part with rows: {inner[place:][:80]}"


def _mark(text: str) -> int:
    return hash(_COUNTED.sub(r"\1", text) if " data-ago" in text else text)
