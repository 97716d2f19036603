"""Bytes that a node has sent and received, by the day of its owner's calendar, and what caps say of them.

A day is a date, whatever its hours: clocks that are put forward or back for the summer change nothing. Where the clock
is set back to an earlier day, that day goes on from what was counted on it; no byte is counted twice, and none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

DAYS_KEPT: Final = 70
"""Two months and more."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of the day that it is now, and of its month up to now."""

    day: Amount
    month: Amount


class Ledger:
    """Amounts by date."""

    def __init__(self, days: Mapping[date, Amount]) -> None:
        self._days = dict(days)

    @property
    def days(self) -> Mapping[date, Amount]:
        """The newest `DAYS_KEPT`."""
        return dict(sorted(self._days.items())[-DAYS_KEPT:])

    def add(self, more: Amount, today: date) -> None:
        """So much has just been sent and received."""
        self._days[today] = self._days.get(today, Amount()) + more

    def now(self, today: date) -> Traffic:
        """A later day than `today`, from before a clock was set back, does not count."""
        month = Amount()
        for day, amount in self._days.items():
            if (day.year, day.month) == (today.year, today.month) and day <= today:
                month += amount
        return Traffic(day=self._days.get(today, Amount()), month=month)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Bytes; 0 = no cap."""

    sent_a_day: int = 0
    sent_a_month: int = 0
    received_a_day: int = 0
    received_a_month: int = 0

    def reached(self, traffic: Traffic, today: date) -> str | None:
        """In a sentence, the cap that is reached and lasts longest; None = there is none."""
        return next(self._reached(traffic, today), None)

    def _reached(self, traffic: Traffic, today: date) -> Iterator[str]:
        next_month = (today.replace(day=28) + timedelta(days=4)).replace(day=1)
        of_month = f"on {next_month.day} {next_month:%B}"
        for cap, used, verb, span, end in (
            (self.sent_a_month, traffic.month.sent, "uploaded", "month", of_month),
            (self.received_a_month, traffic.month.received, "downloaded", "month", of_month),
            (self.sent_a_day, traffic.day.sent, "uploaded", "day", "at midnight"),
            (self.received_a_day, traffic.day.received, "downloaded", "day", "at midnight"),
        ):
            if cap and used >= cap:
                yield (
                    f"{used / 1e9:.2f} GB were {verb} this {span}, of {cap / 1e9:.2f} that you have set:"
                    f" the node goes on {end}."
                )
