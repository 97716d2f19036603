"""Whether an update's gradient is an outlier of the run's own history.

Norms are compared by their logarithm: with the median of the newest `WINDOW` updates, and their median absolute
deviation, made comparable to a standard deviation. An update is held back when its norm is above the median by more
than `DEVIATIONS` of these, and by a factor of `LEAST` at the least, for norms that hardly differ; below, never. Before
`WARM_UP` updates there is nothing to compare with, and clipping alone bounds what an update does.

Held-back updates count in the history as well: if the gradients of a run have really grown, the median follows, after
half a window at the latest, and the run goes on.

Measured, built-in model, two seeds at the default learning rate, everything up to four steps old: no norm was above
twice the median, or above .16 of the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import median
from typing import Final

WINDOW: Final = 32
WARM_UP: Final = 8
DEVIATIONS: Final = 8.0
LEAST: Final = 10.0
_MAD_OF_NORMAL: Final = 0.6745
"""Median absolute deviation of a normal distribution, over its standard deviation."""


def limit(recent: Sequence[float]) -> float:
    """The largest norm that is applied after updates with these, all above 0, of which the newest `WINDOW` count."""
    if len(recent) < WARM_UP:
        return float("inf")
    logs = [log(norm) for norm in recent[-WINDOW:]]
    middle = median(logs)
    deviation = median(abs(value - middle) for value in logs) / _MAD_OF_NORMAL
    return exp(middle + max(log(LEAST), DEVIATIONS * deviation))
