"""What of a rendered page lives: its parts, their rows, and what changed in them between two renderings.

A template marks an element that lives with `data-live` and an id; one whose children are rows, each with an id of its
own, with `data-live="rows"`:

    <p id="facts" data-live>...</p>
    <tbody id="nodes" data-live="rows"><tr id="node-1">...</tr> <tr id="node-2">...</tr></tbody>

Of the first all is sent again when something in it is another; of the second only the rows that are, and the order of
all where that is another. A live element stands in no other, and is on its page in every state of the run. Templates
are the hub's own and escape what they are given, so a tag here is one that a template wrote.

What a browser counts by itself does not make a part another: `<time data-ago>`, how long ago something was.
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
"""What tells two renderings apart: by part, and by "part/row", a hash of its text; of a part of rows that of their ids'
order. They are of this process alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A page at one moment, whole and in its live parts."""

    text: str
    title: str
    parts: Mapping[str, str]
    """What is within each part that has no rows, by its id."""
    rows: Mapping[str, Mapping[str, str]]
    """The rows of the others, whole, by their ids, in order."""
    marks: Marks

    @property
    def revision(self) -> str:
        """The same for two renderings whose live parts do not differ."""
        return f"{hash(frozenset(self.marks.items())) & (2**64 - 1):016x}"


def rendering(text: str) -> Rendering:
    """Of a whole page."""
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
    """What a browser that shows the rendering of `seen` lacks, in JSON's types; of no marks, everything.

    {"title": text, "parts": {part: HTML}, "rows": {part: {"changed": {row: HTML}, "order": [row, ...]}}}, each of them
    only where there is something to say.
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
    """Id, kind and content of every live element."""
    place = 0
    while opening := _LIVE.search(text, place):
        found = _ID.search(opening[0])
        assert found is not None, f"a live part without an id: {opening[0]}"
        place = _end_of(opening[1], text, opening.end())
        yield found[1], opening[2] or "", text[opening.end() : place]


def _end_of(tag: str, text: str, start: int) -> int:
    """Where the element's closing tag begins whose content begins at `start`."""
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
    assert not inner[place:].strip(), f"what is no row stands among rows: {inner[place:][:80]}"


def _mark(text: str) -> int:
    return hash(_COUNTED.sub(r"\1", text) if " data-ago" in text else text)
