"""What all judges have in common: their interface, counters, and the record of their outages."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Protocol

from echo_hub.judges.asking import Asked

log = logging.getLogger(__name__)

FIRST_S: Final = 1.0
"""Longest delay before the first retry of a judge that does not answer, in seconds. The delay doubles with each retry.
Random jitter shortens it by up to half."""
LIMIT_S: Final = 60.0


@dataclass(slots=True)
class Counts:
    """Counters of a judge since it was opened."""

    calls: int = 0
    """Requests to the judge, retries included."""
    unanswered: int = 0
    """Requests that got no answer."""
    without_verdict: int = 0
    """Answers of the judge in which no verdict was found."""
    tokens_read: int = 0
    """Number of tokens that the judge has read, as the judge reports."""
    tokens_written: int = 0
    """Number of tokens that the judge has written, as the judge reports."""


class Judge(Protocol):
    """A model that scores completions. Its value is one component of the reward."""

    name: str
    counts: Counts
    absence: Absence

    async def value(self, asked: Asked) -> float:
        """Return the judge's component for a completion. If the judge does not answer, wait for it.

        Raises ScorerError if the judge's answer has no value. If `is_patient` is False, also raises ScorerError instead
        of waiting.
        """


class Absence:
    """The current outage of a judge, if there is one: why it does not answer. Logs each outage once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reason = ""
        """Why the judge does not answer; "" if it answers."""

    def answered(self) -> None:
        if self.reason:
            log.info("the judge %s answers again", self._name)
        self.reason = ""

    def stays_away(self, reason: str) -> None:
        if not self.reason:
            log.warning("the judge %s does not answer, and is waited for: %s", self._name, reason)
        self.reason = reason
