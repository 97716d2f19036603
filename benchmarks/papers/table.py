"""A paper's claim as a table: what it reports, at which scale, and what the same comparison comes to here."""

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
    """A row: a case, and what the paper has where this one stands."""

    case: Case
    reports: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One claim of one paper."""

    name: str
    """As `--only` knows it."""
    source: str
    """arXiv number, and where in it."""
    scale: str
    """The paper's model and task."""
    entries: tuple[Entry, ...]
    headline: Callable[[Found], Headline]
    columns: Callable[[Case, Sequence[Ran]], Mapping[str, Any]] = lambda case, ran: {}
    """Further figures of a row."""
    seeds: int = SEEDS
    """More where the difference that it tells is small."""
    curves: bool = True
    """Whether a picture of its curves says something."""

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
    """Held out, at the end; mean of all seeds."""
    return fmean(one.accuracy for one in ran)


def finite(value: float) -> float | None:
    """JSON has no word for infinite."""
    return value if math.isfinite(value) else None
