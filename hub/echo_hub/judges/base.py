"""Interface of all judges, with their counters and their availability."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Protocol

from echo_hub.judges.asking import Asked

log = logging.getLogger(__name__)

FIRST_S: Final = 1.0
"""First delay before an unavailable judge is retried; jitter halves it, and it doubles each time."""
LIMIT_S: Final = 60.0


@dataclass(slots=True)
class Counts:
    """Counters of a judge since the hub's start."""

    calls: int = 0
    """Requests, retries included."""
    unanswered: int = 0
    """Requests without an answer."""
    without_verdict: int = 0
    """Answers without a verdict."""
    tokens_read: int = 0
    """Tokens that the judge reports as read."""
    tokens_written: int = 0
    """Tokens that the judge reports as written."""


class Judge(Protocol):
    """One judge of a run."""

    name: str
    """Name of the judge's component."""
    counts: Counts
    absence: Absence

    async def value(self, asked: Asked) -> float:
        """Return the component of a completion. Waits while the judge is unavailable.

        Raises ScorerError if the judge is not `patient` and unavailable, or finds no value for this completion.
        """


class Absence:
    """Availability of a judge; each outage is logged once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reason = ""
        """Reason of the current outage; empty = none known."""

    def answered(self) -> None:
        if self.reason:
            log.info("the judge %s answers again", self._name)
        self.reason = ""

    def stays_away(self, reason: str) -> None:
        if not self.reason:
            log.warning("the judge %s does not answer, and is waited for: %s", self._name, reason)
        self.reason = reason
