"""Weekly working hours, such as "mon-fri 22:00-07:00". Several texts form a union.

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
    r"(?:(?:^|\s+)(?P<from>\d{1,2}:\d{2})-(?P<to>\d{1,2}:\d{2}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Working hours as (start, length) in minutes; the start counts from Monday 00:00 local time. Empty: always."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Schedule:
        """Parse the texts. Raises ConfigError for any other form."""
        return cls(tuple(span for text in texts for span in _spans(text)))

    def allows(self, local: datetime) -> bool:
        return not self.spans or any(_since(begin, local) < length for begin, length in self.spans)

    def next_begin(self, local: datetime) -> str:
        """Return when working hours begin next, such as "tue 22:00"; empty if the node may work at all times."""
        if not self.spans:
            return ""
        waits = [(WEEK_MIN - _since(begin, local), begin) for begin, _ in self.spans]
        day, minute = divmod(min(waits)[1], DAY_MIN)
        return f"{DAYS[day]} {minute // 60:02d}:{minute % 60:02d}"


def _since(begin: int, local: datetime) -> int:
    """Return the whole minutes since working hours that begin at minute `begin` of the week last began, in [0,
    WEEK_MIN).
    """
    minute = local.weekday() * DAY_MIN + local.hour * 60 + local.minute
    return (minute - begin) % WEEK_MIN


def _spans(text: str) -> list[tuple[int, int]]:
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or not text.strip():
        raise _refusal(text)
    days = _days(found["first"], found["last"], text)
    begin, end = (_minute(found["from"], text), _minute(found["to"], text)) if found["from"] else (0, DAY_MIN)
    length = (end - begin) % DAY_MIN or DAY_MIN
    return [(day * DAY_MIN + begin, length) for day in days]


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
        do='Write it like "mon-fri 22:00-07:00", "sat", or "20:00-06:00".',
    )
