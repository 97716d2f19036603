"""Differences that a check of a bundle has found, and their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SHOWN: Final = 1_000
"""Largest number of discrepancies of one kind that are kept. Further discrepancies are only counted."""


class DiscrepancyKind(StrEnum):
    FILE = "file"
    KEY = "key"
    RECORD = "record"
    PROMPT = "prompt"
    DRAW = "draw"
    REWARD = "reward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """One difference between the bundle's claims and the results of the check."""

    kind: DiscrepancyKind
    place: str
    """Name of the file, group, rollout, node or step."""
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class Discrepancies:
    """All discrepancies that the check of one bundle has found."""

    def __init__(self) -> None:
        self._kept: dict[DiscrepancyKind, list[Discrepancy]] = {kind: [] for kind in DiscrepancyKind}
        self.counts: dict[DiscrepancyKind, int] = dict.fromkeys(DiscrepancyKind, 0)

    def add(self, kind: DiscrepancyKind, place: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self._kept[kind]) < SHOWN:
            self._kept[kind].append(Discrepancy(kind=kind, place=place, text=text))

    def of(self, kind: DiscrepancyKind) -> list[Discrepancy]:
        return list(self._kept[kind])

    def __iter__(self) -> Iterator[Discrepancy]:
        for kept in self._kept.values():
            yield from kept

    @property
    def total(self) -> int:
        return sum(self.counts.values())
