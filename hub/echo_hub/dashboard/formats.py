"""Format numbers, times and names for readers. An unknown value, None, becomes an en dash."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from math import floor, log10
from typing import Final, assert_never
from urllib.parse import quote

from echo_shared.records.step_figures import Unit

UNKNOWN: Final = "–"
_THIN_SPACE: Final = "\u202f"
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
_SPANS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def display_name(name: str, node_id: str = "") -> str:
    """Return a node's name without characters that hide or reorder other characters; if nothing is left, a prefix of
    `node_id`.
    """
    visible = "".join(" " if unicodedata.category(c) in _INVISIBLE else c for c in name)
    return " ".join(visible.split()) or node_id[:8] or UNKNOWN


def visible(text: str) -> str:
    """Return the text with invisible and reordering characters written out.

    Control characters become their pictures (␛), other invisible characters become their number (⟨U+202E⟩). Newlines
    and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE else _written_out(c) for c in text)


def _written_out(character: str) -> str:
    number = ord(character)
    picture = 0x2400 + number if number < 0x20 else 0x2421 if number == 0x7F else None
    return chr(picture) if picture else f"⟨U+{number:04X}⟩"


def excerpt(text: str, characters: int = 120) -> str:
    """Return the beginning of a text in one line, with invisible characters written out."""
    line = " ".join(visible(text[: 4 * characters]).split())
    return line if len(line) <= characters and len(text) <= 4 * characters else f"{line[:characters]}…"


def count(value: int | None) -> str:
    """Format a number with thousands separators: 12,480."""
    return UNKNOWN if value is None else f"{value:,}"


def fixed(value: float | None, digits: int = 2) -> str:
    """Format a number with a fixed number of decimals: 0.71."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def rate(value: float | None) -> str:
    """Format a number with about three digits at any size: 0, 0.42, 7.30, 64.2, 112, 4,820."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 99.95 or value == 0 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def dollars(value: float | None) -> str:
    """Format an amount in dollars: $0, $0.40, $12.30, $4,820. Below a cent, show three digits: $0.000123."""
    if value is None:
        return UNKNOWN
    if 0 < value < 0.01:
        return "$" + f"{value:.9f}"[: max(4, 4 - floor(log10(value)))]
    return f"${value:,.0f}" if value >= 999.5 or value == 0 else f"${value:.2f}"


def scientific(value: float | None) -> str:
    """Format a number as a decimal, 0.0031, or in the shorter exponent form, 2.1e-05."""
    return UNKNOWN if value is None else f"{value:.2g}"


def in_unit(value: float | None, unit: Unit) -> str:
    match unit:
        case "s":
            return duration(value)
        case "share":
            return percent(value)
        case "tokens" | "tokens/s":
            return rate(value)
        case "" | "nats/token":
            return scientific(value)
        case _:
            assert_never(unit)


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share of 1 as a percentage: 0.883 becomes 88.3 %."""
    return UNKNOWN if value is None else f"{100 * value:.{digits}f}{_THIN_SPACE}%"


def size(value: int | None) -> str:
    """Format a number of bytes in powers of ten: 1.4 MB."""
    if value is None:
        return UNKNOWN
    scaled = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if scaled < 999.5:
            return f"{scaled:.0f}{_THIN_SPACE}{unit}" if unit == "B" else f"{rate(scaled)}{_THIN_SPACE}{unit}"
        scaled /= 1000
    return f"{rate(scaled)}{_THIN_SPACE}TB"


def duration(seconds: float | None) -> str:
    """Format seconds with the two largest units: 42 s, 3 min 20 s, 2 d 4 h."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}{_THIN_SPACE}s"
    rest = float(round(seconds))
    parts: list[str] = []
    for length, unit in _SPANS:
        whole, rest = divmod(rest, length)
        if whole or parts:
            parts.append(f"{whole:.0f}{_THIN_SPACE}{unit}" if whole else "")
    return " ".join(part for part in parts[:2] if part)


def ago(at: float, as_of: float) -> str:
    """Format the time that has passed since `at` with its largest unit: now, 42 s ago, 3 min ago."""
    seconds = as_of - at
    if seconds < 5:
        return "now"
    length, unit = next((span for span in _SPANS if seconds >= span[0]), _SPANS[-1])
    return f"{seconds // length:.0f}{_THIN_SPACE}{unit} ago"


def iso(at: float) -> str:
    """Format a Unix time for machines and tooltips: 2026-03-01T12:00:00Z."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def date(at: float) -> str:
    """Format a Unix time as the date in UTC: 2026-03-01."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def path_part(name: str) -> str:
    """Quote a name as one part of an address's path."""
    return quote(name, safe="")


def clock(at: float) -> str:
    """Format a Unix time as the time of day in UTC: 12:00:00."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
