"""The recent average credit of a node or a team: an exponential average of tokens a day, with a half-life of one week.

The rule is BOINC's, https://github.com/BOINC/boinc/wiki/CreditNew and `update_average` in its lib/util.cpp, in the
limit of a zero interval between updates. With h = 7 days, work of w tokens at time t turns the earlier average r(t0)
into

    r(t) = r(t0) · 2^(-(t - t0) / h)  +  w · (ln 2) / h

So if w tokens are sampled every day, the average converges to w tokens a day; a week after work stops, half is left.
BOINC divides the work by the time since the last update. Here the number and order of updates do not matter: equal
receipts give equal averages on any hub.

The stored value is one number that does not change with time,

    L = log2 r(t) + t / h,    and so    r(t) = 2^(L - t / h)

Decay lowers all exponents by the same amount, so the larger L always means the larger average. Therefore, rows ordered
by L never need an update. Near the year 2100, L is about 7,000, which leaves 13 digits of a double.
"""

from __future__ import annotations

from math import exp2, log, log2
from typing import Final

HALF_LIFE_S: Final = 7 * 86_400.0
_DAYS: Final = HALF_LIFE_S / 86_400.0


def added(recent: float | None, tokens: int, at: float) -> float | None:
    """Return L after work of `tokens` at time `at`, in seconds since the epoch. `recent` is L before that work; None if
    there was no earlier work.
    """
    if tokens <= 0:
        return recent
    work = log2(tokens * log(2) / _DAYS) + at / HALF_LIFE_S
    if recent is None:
        return work
    low, high = sorted((recent, work))
    return high + log2(1 + exp2(low - high))


def average(recent: float | None, at: float) -> float:
    """Return the average in tokens a day at time `at`; `recent` is the stored L."""
    return 0.0 if recent is None else exp2(min(recent - at / HALF_LIFE_S, 1_000.0))
