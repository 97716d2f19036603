"""The recent average credit of a node or a team: tokens a day, exponential, with a half-life of one week.

The rule is BOINC's, https://github.com/BOINC/boinc/wiki/CreditNew and `update_average` in its lib/util.cpp, in the form
that its formula takes as the interval between two updates goes to nothing. With h = 7 days, work of w tokens at the
time t makes of the average r(t0), as of the time t0 before,

    r(t) = r(t0) · 2^(-(t - t0) / h)  +  w · (ln 2) / h

So w tokens on each day, for ever, come to an average of w tokens a day; who stops has half of it a week later. BOINC
divides the work by the time since the update before; here it does not matter how the work is cut into updates, nor in
what order they come, so the same receipts give the same average on any hub.

What is stored is one number that time does not change,

    L = log2 r(t) + t / h,    and so    r(t) = 2^(L - t / h)

A week's decay takes 1 of the exponent from everybody alike: whose L is larger has the larger average at any time, so an
order by L never has to be brought up to date. Near the year 2100, L is about 7,000, of which a double has 13 digits.
"""

from __future__ import annotations

from math import exp2, log, log2
from typing import Final

HALF_LIFE_S: Final = 7 * 86_400.0
_DAYS: Final = HALF_LIFE_S / 86_400.0


def added(recent: float | None, tokens: int, at: float) -> float | None:
    """L after work of so many tokens at the time `at`, in seconds since the epoch; None = there was none yet."""
    if tokens <= 0:
        return recent
    work = log2(tokens * log(2) / _DAYS) + at / HALF_LIFE_S
    if recent is None:
        return work
    low, high = sorted((recent, work))
    return high + log2(1 + exp2(low - high))


def average(recent: float | None, at: float) -> float:
    """Tokens a day at the time `at`."""
    return 0.0 if recent is None else exp2(min(recent - at / HALF_LIFE_S, 1_000.0))
