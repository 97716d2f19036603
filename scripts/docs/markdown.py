"""Markdown from Python: tables, and the docstrings of class attributes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of one-line Markdown cells; empty without rows."""
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


def attribute_docstrings(kind: type[Any]) -> dict[str, str]:
    """Return, by attribute, the string below each attribute in the class's own body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    said: dict[str, str] = {}
    name = ""
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                continue
            case ast.Expr(value=ast.Constant(value=str(about))) if name:
                said[name] = inspect.cleandoc(about)
        name = ""
    return said
