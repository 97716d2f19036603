"""Settings for the choice of active (paid) nodes: spending cap, safety margin, minimum time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HYSTERESIS: Final = 0.05
"""Relative change below which the set of active nodes stays as it is, so that measurement noise causes no switching.

Nodes are added once the active ones return this share less than demand times margin. Nodes are removed only if the
others still return demand times margin. A replacement must save this share of the cost. The default margin of 15 % is
three times as large.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """Settings for the choice of active nodes; money is in US dollars."""

    spend_cap_per_hour: float = 0.0
    """Limit on the total price of all active nodes, in dollars per hour; 0 = only nodes that cost nothing work."""
    margin: float = 1.15
    """Safety factor: rollouts per step that active nodes should return in time, divided by the learner's demand."""
    dwell_s: float = 60.0
    """Minimum seconds for which a node stays active, unless the spending cap is lowered."""
