"""Bytes that a node has sent and received, by local calendar day, and limits on them.

A day is a date of any length, so daylight saving changes nothing. If the clock is set back to an earlier day, counting
continues on that day; no byte is counted twice or lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

DAYS_KEPT: Final = 70
"""Number of days that are stored: slightly more than two months, for the monthly limits."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Numbers of bytes sent and received."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes sent and received on the current day, and in its month up to now."""

    day: Amount
    month: Amount


class TrafficByDate:
    def __init__(self, days: Mapping[date, Amount]) -> None:
        self._days = dict(days)

    @property
    def days(self) -> Mapping[date, Amount]:
        return dict(sorted(self._days.items())[-DAYS_KEPT:])

    def add(self, more: Amount, today: date) -> None:
        self._days[today] = self._days.get(today, Amount()) + more

    def now(self, today: date) -> Traffic:
        """Return the current traffic. Days after `today`, counted before a clock was set back, are left out."""
        month = Amount()
        for day, amount in self._days.items():
            if (day.year, day.month) == (today.year, today.month) and day <= today:
                month += amount
        return Traffic(day=self._days.get(today, Amount()), month=month)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Limits on sent and received bytes, by day and by month; 0 = no limit."""

    sent_a_day: int = 0
    sent_a_month: int = 0
    received_a_day: int = 0
    received_a_month: int = 0

    def reached(self, traffic: Traffic, today: date) -> str | None:
        """Return a sentence about a limit that the traffic has reached, preferably a monthly one; None = it has reached
        no limit.
        """
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
                    f"{used / 1e9:.2f} GB were {verb} this {span}, of {cap / 1e9:.2f} that you have set: the node "
                    f"resumes {end}."
                )
