"""Weekly working hours with levels, such as "mon-fri 22:00-07:00" or "07:00-22:00 25%".

    schedule = ["22:00-07:00", "07:00-22:00 25%"]       all by night, a quarter by day
    schedule = ["100%", "mon-fri 09:00-17:00 0%"]       at all times, except in office hours

A level is the share of its device's time that the engine may use; a text without a level means 100%. Outside all texts
the level is 0. If several texts cover a moment, the last of them counts.

Working hours belong to the day on which they begin: fri 22:00-07:00 ends on Saturday morning. A text without days
applies every day; a text without hours applies all day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from echo_shared.errors import ConfigError

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN: Final = 24 * 60
WEEK_MIN: Final = 7 * DAY_MIN

_SPAN: Final = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?)?"
    r"(?:(?:^|\s+)(?P<from>\d{1,2}:\d{2})-(?P<to>\d{1,2}:\d{2}))?"
    r"(?:(?:^|\s+)(?P<level>\d{1,3})\s?%)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class WeekSpan:
    """A time span of every week."""

    begin: int
    """Minutes since Monday 00:00, local time."""
    length: int
    """Minutes."""
    level: float = 1.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Working hours of a week with their levels. Without spans the level is always 1."""

    spans: tuple[WeekSpan, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Schedule:
        """Parse the texts. Raises ConfigError for any other form, and for a schedule without working hours."""
        found = cls(tuple(span for text in texts for span in _spans(text)))
        if not any(map(found._at, found._bounds)):
            raise ConfigError(
                "The schedule leaves no time to work.",
                got=", ".join(texts),
                do="Add hours with a level above 0%, or stop the node with: echo-node pause",
            )
        return found

    def level(self, local: datetime) -> float:
        """Return the share of its device's time that the engine may use, from 0 to 1."""
        return self._at(_minute_of_week(local))

    def next_begin(self, local: datetime) -> str:
        """Return when working hours begin next, such as "tue 22:00"; empty if the node may work at all times."""
        bounds = [bound for bound in self._after(local) if self._at(bound)]
        return _named(bounds[0]) if self.spans and bounds else ""

    def until(self, local: datetime) -> str:
        """Return the time of the next change of level: "22:00" within a day, else "tue 22:00"; empty = no change."""
        now = self.level(local)
        bound = next((bound for bound in self._after(local) if self._at(bound) != now), None)
        if bound is None:
            return ""
        is_soon = (bound - _minute_of_week(local)) % WEEK_MIN < DAY_MIN
        return _named(bound).partition(" ")[2] if is_soon else _named(bound)

    def _at(self, minute: int) -> float:
        levels = [span.level for span in self.spans if (minute - span.begin) % WEEK_MIN < span.length]
        return levels[-1] if levels else float(not self.spans)

    @property
    def _bounds(self) -> set[int]:
        """Minutes of the week, since Monday 00:00, at which the level (share of the device's time) may change."""
        return {0} | {minute % WEEK_MIN for span in self.spans for minute in (span.begin, span.begin + span.length)}

    def _after(self, local: datetime) -> list[int]:
        """Return the minutes of the week at which the level may change, beginning with the next one after `local`."""
        now = _minute_of_week(local)
        return sorted(self._bounds, key=lambda bound: (bound - now - 1) % WEEK_MIN)


def _minute_of_week(local: datetime) -> int:
    return local.weekday() * DAY_MIN + local.hour * 60 + local.minute


def _named(minute: int) -> str:
    day, of_day = divmod(minute, DAY_MIN)
    return f"{DAYS[day]} {of_day // 60:02d}:{of_day % 60:02d}"


def _spans(text: str) -> list[WeekSpan]:
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or not text.strip():
        raise _refusal(text)
    days = _days(found["first"], found["last"], text)
    begin, end = (_minute(found["from"], text), _minute(found["to"], text)) if found["from"] else (0, DAY_MIN)
    length = (end - begin) % DAY_MIN or DAY_MIN
    percent = 100 if found["level"] is None else int(found["level"])
    if percent > 100:
        raise _refusal(text)
    return [WeekSpan(day * DAY_MIN + begin, length, percent / 100) for day in days]


def _days(first: str | None, last: str | None, text: str) -> list[int]:
    if first is None:
        return list(range(7))
    if first not in DAYS or (last is not None and last not in DAYS):
        raise _refusal(text)
    begin, end = DAYS.index(first), DAYS.index(last or first)
    return [(begin + step) % 7 for step in range((end - begin) % 7 + 1)]


def _minute(clock: str, text: str) -> int:
    hour, minute = (int(part) for part in clock.split(":"))
    if minute >= 60 or hour * 60 + minute > DAY_MIN:
        raise _refusal(text)
    return hour * 60 + minute


def _refusal(text: str) -> ConfigError:
    return ConfigError(
        "This is not a valid time span of a week.",
        got=repr(text),
        do='Write it like "mon-fri 22:00-07:00", "sat", "20:00-06:00", or "07:00-22:00 25%".',
    )
