"""Detection of outliers among a run's gradient norms, by comparison with the norms of its recent updates.

The logarithm of a norm is compared with the median over the newest `WINDOW` updates. The unit of distance is the median
absolute deviation of these logarithms, scaled to a standard deviation. An update is held back (not applied) if its norm
exceeds the median by more than `DEVIATIONS` units and by a factor of at least `LEAST`. The factor matters if norms
hardly differ. Small norms are never held back. Before `WARM_UP` updates there is no comparison; then only clipping
limits an update.

Held-back updates enter the history too. If a run's gradients really have grown, the median follows after at most half a
window, and updates are applied again.

Measured with the built-in model, two seeds, the default learning rate and rollouts up to four steps old: every norm was
below twice the median, or 0.16 times the limit.
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
"""Median absolute deviation of a normal distribution, divided by its standard deviation."""


def limit(recent: Sequence[float]) -> float:
    """Return the largest norm to apply, given the norms of recent updates (all above 0; the newest `WINDOW` count)."""
    if len(recent) < WARM_UP:
        return float("inf")
    logs = [log(norm) for norm in recent[-WINDOW:]]
    middle = median(logs)
    deviation = median(abs(value - middle) for value in logs) / _MAD_OF_NORMAL
    return exp(middle + max(log(LEAST), DEVIATIONS * deviation))
