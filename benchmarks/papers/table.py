"""A paper's claim as a table: the paper's result, its scale, and the same comparison with Echo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.papers.cases import SEEDS, Case
from benchmarks.papers.ran import Ran
from benchmarks.papers.runs import Found, Wanted

Headline = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row: a case, and the paper's result for it."""

    case: Case
    reports: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One claim of one paper."""

    name: str
    """Name for `--only`."""
    source: str
    """arXiv number, and the place in the paper."""
    scale: str
    """The paper's model and task."""
    entries: tuple[Entry, ...]
    headline: Callable[[Found], Headline]
    columns: Callable[[Case, Sequence[Ran]], Mapping[str, Any]] = lambda case, ran: {}
    """Computes further figures of a row."""
    seeds: int = SEEDS
    """More seeds are needed for a small difference."""
    curves: bool = True
    """False if the table needs no picture."""

    @property
    def cases(self) -> list[Case]:
        return [entry.case for entry in self.entries]

    @property
    def wanted(self) -> Wanted:
        return self.cases, self.seeds

    def rows(self, found: Found) -> list[dict[str, Any]]:
        return [
            {
                "table": self.name,
                "case": entry.case.name,
                "seeds": len(found[entry.case]),
                **_accuracies(found[entry.case]),
                **self.columns(entry.case, found[entry.case]),
                "paper": entry.reports,
                "paper_scale": self.scale,
                "source": self.source,
            }
            for entry in self.entries
        ]


def _accuracies(ran: Sequence[Ran]) -> dict[str, float]:
    final = [one.accuracy for one in ran]
    return {
        "before": fmean(one.points[0].accuracy for one in ran),
        "accuracy": fmean(final),
        "lowest": min(final),
        "highest": max(final),
        "half_way": fmean(one.points[len(one.points) // 2].accuracy for one in ran),
    }


def accuracy(ran: Sequence[Ran]) -> float:
    """Mean held-out accuracy of all seeds at the end."""
    return fmean(one.accuracy for one in ran)


def finite(value: float) -> float | None:
    """Replace infinity, which JSON lacks, by None."""
    return value if math.isfinite(value) else None
