"""A picture for sharing that shows the standing of a node or a team. It is a PNG of 1200 x 630 pixels, the size that
social networks and messengers show.

Names are untrusted: if the font lacks a character of a name, the picture shows a prefix of the node's id instead.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from echo_hub.dashboard.formats import count, display_name, percent, rate
from echo_hub.dashboard.picture_font import font, has_shape
from echo_hub.dashboard.work_curve import WorkCurve
from echo_shared.records.credit import CreditStanding

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH: Final = 1_200
HEIGHT: Final = 630
_PAPER, _INK, _FAINT, _ACCENT, _BAR, _LINE = "#fdfcf8", "#14213d", "#5b6782", "#0b7a75", "#bfe3df", "#d9d4c4"
_MARGIN: Final = 64
_CURVE: Final = (_MARGIN, 396, WIDTH - _MARGIN, 560)
"""Left, top, right and bottom edge of the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePicture:
    """The content of a picture for sharing: the run's name, and the standing and work curve of a node or team."""

    run_name: str
    standing: CreditStanding
    num_ranked: int
    curve: WorkCurve


def draw(said: SharePicture) -> bytes:
    """Return the PNG file. Takes tens of milliseconds, so do not call it on an event loop."""
    from PIL import Image, ImageDraw

    standing = said.standing
    image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, 14, HEIGHT), fill=_ACCENT)
    what = "TEAM" if standing.kind == "team" else "LENT A MACHINE"
    _write(pen, (_MARGIN, 52), f"{what} TO TEACH", 24, _ACCENT)
    _write(pen, (_MARGIN, 84), _drawable(said.run_name, "a language model"), 34, _FAINT)
    fallback = f"node {standing.node}" if standing.node else "a team"
    _write(pen, (_MARGIN, 140), _drawable(standing.name, fallback), 72, _INK)
    place = f"#{count(standing.rank)} of {count(said.num_ranked)}" if standing.rollouts else "new"
    figures = [
        (place, "by rollouts"),
        (count(standing.rollouts), "rollouts that counted"),
        (count(standing.tokens), "tokens"),
        (count(standing.streak_days), "day in a row" if standing.streak_days == 1 else "days in a row"),
    ]
    for column, (figure, label) in enumerate(figures):
        left = _MARGIN + column * 272
        _write(pen, (left, 252), figure, 46, _INK, most=256)
        _write(pen, (left, 312), label, 22, _FAINT, most=256)
    _draw_curve(pen, said.curve)
    share = f"{percent(standing.share)} of all counted rollouts; {rate(standing.recent)} tokens a day recently"
    _write(pen, (_MARGIN, 578), share.replace("\u202f", " "), 22, _FAINT)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw_curve(pen: ImageDraw, curve: WorkCurve) -> None:
    left, top, right, bottom = _CURVE
    pen.line((left, bottom, right, bottom), fill=_LINE, width=2)
    for x, wide, high in curve.bars(right - left, bottom - top):
        pen.rectangle((left + x, bottom - high, left + x + max(wide, 1.0), bottom), fill=_BAR)
    line = [(left + x, top + y) for x, y in curve.reward_line(right - left, bottom - top)]
    if len(line) > 1:
        pen.line(line, fill=_ACCENT, width=4, joint="curve")
    if not curve.is_empty:
        said = f"reward over {count(curve.points[-1].step)} steps; bars: share of each step's tokens"
        _write(pen, (left, top - 34), said, 20, _FAINT)


def _write(
    pen: ImageDraw, place: tuple[float, float], text: str, size: int, fill: str, most: int = WIDTH - 2 * _MARGIN
) -> None:
    wide = font(size).getlength(text)
    fitting = size if wide <= most else max(8, int(size * most / wide))
    pen.text(place, text, font=font(fitting), fill=fill)


def _drawable(name: str, fallback: str) -> str:
    shown = display_name(name)
    return shown if all(has_shape(character) for character in set(shown)) else fallback
