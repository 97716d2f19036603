"""Linux's one-line files."""

from __future__ import annotations

from pathlib import Path


def text_of(file: Path) -> str:
    """What stands in it; empty where it cannot be read: a device that has just gone, or that does not tell."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(file: Path) -> int | None:
    """The whole number in it; None where there is none."""
    text = text_of(file)
    return int(text) if text.removeprefix("-").isdecimal() else None
