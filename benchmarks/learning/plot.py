"""Picture of all curves: held-out accuracy and training reward against trained rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.harness import curves
from benchmarks.learning.virtual_run import Point


def draw(points: Mapping[str, Sequence[Sequence[Point]]]) -> bytes:
    """Draw a PNG of all cases."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    held_out, training = figure.subplots(1, 2)
    curves.draw(held_out, {name: _curve(seeds, lambda point: point.accuracy) for name, seeds in points.items()})
    held_out.set_title("Greedy accuracy on held-out problems")
    # There is no reward before the first step.
    stepped = {name: [of_seed[1:] for of_seed in seeds] for name, seeds in points.items()}
    curves.draw(training, {name: _curve(seeds, lambda point: point.reward or 0.0) for name, seeds in stepped.items()})
    training.set_title("Mean reward of the step's rollouts")
    for axes in (held_out, training):
        axes.set_xlabel("Trained rollouts")
    figure.legend(*held_out.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    return curves.png(figure)


def _curve(seeds: Sequence[Sequence[Point]], value: Callable[[Point], float]) -> curves.Curve:
    places = list(zip(*seeds, strict=True))
    return [place[0].trained_rollouts for place in places], [[value(point) for point in place] for place in places]
