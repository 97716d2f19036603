"""Reads Linux's one-line files."""

from __future__ import annotations

from pathlib import Path


def text_of(file: Path) -> str:
    """Return the file's text; "" if it is unreadable, as for a removed or silent device."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(file: Path) -> int | None:
    """Return the integer in the file; None if the file cannot be read or contains no integer."""
    text = text_of(file)
    return int(text) if text.removeprefix("-").isdecimal() else None
