"""Write Markdown for the generated pages: tables, prose from docstrings, and code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of one-line Markdown cells; "" if there are no rows."""
    lines = [_row(row) for row in rows]
    if not lines:
        return ""
    return "\n".join([_row(headings), _row(["---"] * len(headings)), *lines]) + "\n\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def text(words: str | None) -> str:
    """Return prose on one line, with Markdown's special characters escaped outside backticks."""
    parts = re.split(r"(`+[^`]*`+)", " ".join((words or "").split()))
    return "".join(part.replace("|", r"\|") if part.startswith("`") else _prose(part) for part in parts)


def _prose(words: str) -> str:
    return re.sub(r"([|<*_\[\]])", r"\\\1", words)


def code(words: str) -> str:
    """Return `words` as code for a table cell."""
    fence = "``" if "`" in words else "`"
    return f"{fence}{' '.join(words.split())}{fence}".replace("|", r"\|")


def paragraphs(docstring: str | None) -> str:
    """Return a docstring as Markdown; its indented parts become code blocks."""
    return inspect.cleandoc(docstring or "") + "\n\n"
