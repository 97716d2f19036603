"""Curves over several seeds, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[Sequence[float]]]
"""Places on the x-axis, and the values of all seeds at each place."""


def draw(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Draw each curve as its mean over seeds, with a band from the lowest to the highest seed."""
    for number, (name, (places, values)) in enumerate(curves.items()):
        # Strokes distinguish lines that lie on each other.
        stroke = ("-", "--", ":", "-.")[number % 4]
        (line,) = axes.plot(places, [fmean(of_seeds) for of_seeds in values], label=name, linestyle=stroke)
        lowest, highest = [min(of_seeds) for of_seeds in values], [max(of_seeds) for of_seeds in values]
        axes.fill_between(places, lowest, highest, color=line.get_color(), alpha=0.08)
    axes.grid(alpha=0.3)


def png(figure: Figure) -> bytes:
    """Render a figure."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
