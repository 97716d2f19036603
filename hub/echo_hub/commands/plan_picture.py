"""Draw a plan's steps as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from echo_hub.commands.plan import Plan
from echo_hub.commands.plan_text import LANES, seconds
from echo_hub.core.capacity.model import Pool
from echo_hub.core.capacity.timeline import Lane, TimeSpan, timeline

WIDTH: Final = 960.0
LEFT: Final = 96.0
"""Horizontal position of time 0 in the picture."""

LANE_HEIGHT: Final = 34.0
TOP: Final = 58.0
COLOURS: Final[dict[Lane, str]] = {
    "training": "#087279",
    "waiting": "#e7b493",
    "broadcast": "#6747ad",
    "sampling": "#33689b",
}
"""Colours of the picture's bars, the same as on the operator's page."""

TICKS: Final = 6
LETTER: Final = 7.0
"""Width of a digit in the picture's font."""


def write_svg(plan: Plan, path: Path) -> None:
    """Write the picture of a few steps to `path`. Write nothing if the nodes return no rollouts."""
    told = plan.prediction
    if told.rollouts_per_s:
        title = f"The learner trains {told.utilisation:.0%} of the time, a step every {seconds(told.period_s)}"
        spans = timeline(plan.fleet.workload, Pool.of(plan.fleet.nodes))
        path.write_text(svg(spans, title=title), encoding="utf-8")


def svg(spans: Sequence[TimeSpan], *, title: str) -> str:
    """Return the picture: one row each for learner, broadcast of versions, and nodes, above a scale of seconds."""
    end = max(span.end_s for span in spans)
    height = TOP + LANE_HEIGHT * len(LANES) + 62
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" '
            f'font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH:.0f}" height="{height:.0f}" fill="#fbfdfd"/>',
            f'<text x="16" y="28" font-size="14" fill="#10201f">{escape(title)}</text>',
            *_lanes(spans, end),
            *_scale(end),
            *_legend(height),
            "</svg>\n",
        )
    )


def _lanes(spans: Sequence[TimeSpan], end: float) -> Iterator[str]:
    scale = (WIDTH - LEFT - 16) / end
    for number, (name, lanes) in enumerate(LANES.items()):
        y = TOP + LANE_HEIGHT * number
        yield f'<text x="16" y="{y + 18:.0f}" fill="#51625f">{name}</text>'
        for span in spans:
            if span.lane in lanes:
                x, width = LEFT + span.begin_s * scale, max((span.end_s - span.begin_s) * scale - 1, 0.5)
                colour = COLOURS[span.lane]
                yield f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="26" fill="{colour}" rx="2"/>'
                label = str(span.number)
                if span.lane != "waiting" and width > LETTER * len(label) + 4:
                    at = f'x="{x + width / 2:.1f}" y="{y + 17:.0f}"'
                    yield f'<text {at} text-anchor="middle" fill="#ffffff">{label}</text>'


def _scale(end: float) -> Iterator[str]:
    y = TOP + LANE_HEIGHT * len(LANES) + 6
    for tick in range(TICKS + 1):
        x = LEFT + (WIDTH - LEFT - 16) * tick / TICKS
        anchor = "end" if tick == TICKS else "middle"
        at = f'x="{x:.1f}" y="{y + 10:.0f}" text-anchor="{anchor}"'
        yield f'<text {at} fill="#51625f">{seconds(end * tick / TICKS)}</text>'


def _legend(height: float) -> Iterator[str]:
    meanings = {
        "training": "trains this step",
        "waiting": "waits for rollouts",
        "broadcast": "this version is being sent to the nodes",
        "sampling": "nodes sample with this version",
    }
    x = LEFT
    for lane, colour in COLOURS.items():
        yield f'<rect x="{x:.0f}" y="{height - 28:.0f}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18:.0f}" y="{height - 18:.0f}" fill="#10201f">{meanings[lane]}</text>'
        x += 40 + 6.4 * len(meanings[lane])
