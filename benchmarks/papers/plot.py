"""Picture of a table: held-out accuracy against steps, with a line for each case."""

from __future__ import annotations

import io
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.papers.runs import Found
from benchmarks.papers.table import Table


def draw(table: Table, found: Found) -> bytes:
    """Draw a PNG. Each line is the mean over seeds; its band goes from the lowest to the highest seed."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (case, ran) in enumerate(found.items()):
        places = list(zip(*(one.points for one in ran), strict=True))
        steps = [case.evaluate_every * place for place in range(len(places))]
        values = [[point.accuracy for point in place] for place in places]
        # Strokes distinguish lines that lie on each other.
        stroke = ("-", "--", ":", "-.")[number % 4]
        (line,) = axes.plot(steps, [fmean(of_seeds) for of_seeds in values], label=case.name, linestyle=stroke)
        lowest, highest = [min(of_seeds) for of_seeds in values], [max(of_seeds) for of_seeds in values]
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.08)
    axes.set_title(f"{table.name} ({table.source})", fontsize="medium")
    axes.set_xlabel("Steps")
    axes.set_ylabel("Greedy accuracy on held-out problems")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
