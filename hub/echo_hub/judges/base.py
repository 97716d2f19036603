"""What all judges have in common: who waits for whom, and what is counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Protocol

from echo_hub.judges.asking import Asked

log = logging.getLogger(__name__)

FIRST_S: Final = 1.0
"""Until a judge that stays away is tried again, or half of it; twice as long each time."""
LIMIT_S: Final = 60.0


@dataclass(slots=True)
class Counts:
    """What a judge has been asked since the hub's start."""

    calls: int = 0
    """Requests, those among them that were made again."""
    unanswered: int = 0
    """How many of these were not answered."""
    without_verdict: int = 0
    """How many answers gave none."""
    tokens_read: int = 0
    """That it says it has read,"""
    tokens_written: int = 0
    """and written."""


class Judge(Protocol):
    """One of a run's."""

    name: str
    """Of its component."""
    counts: Counts
    absence: Absence

    async def value(self, asked: Asked) -> float:
        """The component of a completion. Waits as long as the judge stays away, or, where it is not `patient`, raises
        ScorerError then, as it does where the judge finds no value for this completion."""


class Absence:
    """Whether a judge answers. It is told of once each time that it stays away."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reason = ""
        """Why it does not answer now; empty: it does, as far as is known."""

    def answered(self) -> None:
        if self.reason:
            log.info("the judge %s answers again", self._name)
        self.reason = ""

    def stays_away(self, reason: str) -> None:
        if not self.reason:
            log.warning("the judge %s does not answer, and is waited for: %s", self._name, reason)
        self.reason = reason
