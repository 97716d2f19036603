"""Draws a certificate of contribution as SVG, from its signed contents. Only the signed file is a proof."""

from __future__ import annotations

from typing import Final
from xml.sax.saxutils import escape

from echo_shared.records.contribution import Contribution
from echo_shared.signing.identity import fingerprint

WIDTH: Final = 1_000
HEIGHT: Final = 620
_FONT: Final = "'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
_MONO: Final = "'SF Mono', Consolas, 'DejaVu Sans Mono', monospace"
_INK, _FAINT, _ACCENT, _PAPER, _LINE = "#14213d", "#5b6782", "#0b7a75", "#fdfcf8", "#d9d4c4"


def picture(said: Contribution) -> str:
    """Return the SVG file. Names that node and hub chose are escaped, and their font is made small enough to fit."""
    period = f"{said.first_seen[:10]} to {said.last_seen[:10]}"
    amounts = [
        (said.trained_tokens, "tokens trained on", said.trained_rollouts),
        (said.evaluated_tokens, "tokens for evaluation", said.evaluated_rollouts),
        *(
            [(said.answered_tokens, "tokens for others' programs", said.answered_rollouts)]
            if said.answered_tokens
            else []
        ),
        (said.others_checked_tokens, "tokens checked for others", said.others_checked_rollouts),
    ]
    if said.answered_tokens:
        amounts.insert(2, (said.answered_tokens, "tokens for tenants", said.answered_rollouts))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="Certificate of contribution" font-family="{_FONT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{_PAPER}"/>',
        f'<rect x="24" y="24" width="{WIDTH - 48}" height="{HEIGHT - 48}" rx="14" fill="none" stroke="{_LINE}"'
        ' stroke-width="2"/>',
        f'<rect x="24" y="24" width="10" height="{HEIGHT - 48}" rx="5" fill="{_ACCENT}"/>',
        _text(72, 88, "CERTIFICATE OF CONTRIBUTION", size=18, fill=_ACCENT, weight=700, spacing=3),
        _text(72, 148, said.node_name, size=_fitting(said.node_name, 44), fill=_INK, weight=700),
        _text(72, 190, "lent its computer to train a language model in the run", size=19, fill=_FAINT),
        _text(72, 230, said.run_name, size=_fitting(said.run_name, 30), fill=_INK, weight=600),
    ]
    width = 3 * 292 // len(amounts)
    for column, (tokens, what, rollouts) in enumerate(amounts):
        x = 72 + column * width
        parts.append(f'<line x1="{x}" y1="272" x2="{x + width - 40}" y2="272" stroke="{_LINE}" stroke-width="2"/>')
        size = _fitting(f"{tokens:,}", 46, width - 42)
        parts.append(_text(x, 330, f"{tokens:,}", size=size, fill=_INK, weight=700))
        parts.append(_text(x, 362, what, size=17, fill=_FAINT))
        parts.append(_text(x, 388, f"in {rollouts:,} completions", size=15, fill=_FAINT))
    checked = f"Recomputed by the hub: {said.checks_passed:,} found honest, {said.checks_failed:,} not."
    rows = [
        ("From", f"{period}, as of {said.issued_at}"),
        ("Node", said.node_id),
        ("Run", said.run_id),
        ("Hub's key", fingerprint(bytes.fromhex(said.hub_key))),
    ]
    parts.append(_text(72, 430, checked, size=16, fill=_INK))
    for number, (name, value) in enumerate(rows):
        y = 468 + number * 25
        parts.append(_text(72, y, name, size=15, fill=_FAINT))
        parts.append(_text(172, y, value, size=_fitting(value, 15, 780), fill=_INK, family=_MONO))
    note = "The signed file next to this picture is the proof. Check it with: echo-node receipts verify FILE"
    parts.append(_text(72, 576, note, size=13, fill=_FAINT))
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: int,
    y: int,
    text: str,
    *,
    size: int,
    fill: str,
    weight: int = 400,
    spacing: int = 0,
    family: str = "",
) -> str:
    look = f' font-family="{family}"' if family else ""
    look += f' letter-spacing="{spacing}"' if spacing else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" font-weight="{weight}"{look}>{escape(text)}</text>'


def _fitting(text: str, size: int, width: int = 856) -> int:
    """Return a font size, at most `size`, at which the text is not wider than `width` in any common font."""
    return max(6, min(size, int(width / max(1.0, sum(map(_ems, text))))))


def _ems(character: str) -> float:
    """Return an upper bound on the width of the character in bold, in em."""
    if ord(character) >= 0x1100 or character in "MWmw@%":
        return 1.15
    return 0.9 if character.isupper() else 0.74
