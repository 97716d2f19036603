"""Picture of all curves: held-out accuracy and training reward against trained rollouts."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning.virtual_run import Point


def draw(curves: Mapping[str, Sequence[Sequence[Point]]]) -> bytes:
    """Draw a PNG. Each line is the mean over seeds; its band goes from the lowest to the highest seed."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    held_out, training = figure.subplots(1, 2)
    _panel(held_out, curves, lambda point: point.accuracy, first=0)
    held_out.set_title("Greedy accuracy on held-out problems")
    _panel(training, curves, lambda point: point.reward, first=1)
    training.set_title("Mean reward of the step's rollouts")
    figure.legend(*held_out.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def _panel(
    axes: Axes, curves: Mapping[str, Sequence[Sequence[Point]]], value: Callable[[Point], float | None], *, first: int
) -> None:
    for number, (name, of_case) in enumerate(curves.items()):
        by_place = list(zip(*(points[first:] for points in of_case), strict=True))
        rollouts = [seeds[0].trained_rollouts for seeds in by_place]
        values = [[found for point in seeds if (found := value(point)) is not None] for seeds in by_place]
        means = [fmean(of_seeds) for of_seeds in values]
        # Strokes distinguish lines that lie on each other.
        (line,) = axes.plot(rollouts, means, label=name, linewidth=1.6, linestyle=("-", "--")[number % 2])
        lowest, highest = [min(of_seeds) for of_seeds in values], [max(of_seeds) for of_seeds in values]
        axes.fill_between(rollouts, lowest, highest, color=line.get_color(), alpha=0.08)
    axes.set_xlabel("Trained rollouts")
    axes.grid(alpha=0.3)
