"""Picture of a table: held-out accuracy against steps, with a line for each case."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.harness import curves
from benchmarks.papers.runs import Found
from benchmarks.papers.table import Table


def draw(table: Table, found: Found) -> bytes:
    """Draw a PNG of a table."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, curves.Curve] = {}
    for case, ran in found.items():
        values = [[point.accuracy for point in place] for place in zip(*(one.points for one in ran), strict=True)]
        lines[case.name] = [case.evaluate_every * place for place in range(len(values))], values
    curves.draw(axes, lines)
    axes.set_title(f"{table.name} ({table.source})", fontsize="medium")
    axes.set_xlabel("Steps")
    axes.set_ylabel("Greedy accuracy on held-out problems")
    figure.legend(loc="outside right center", fontsize="small")
    return curves.png(figure)
