"""Settings of activation: prices, cap and margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HYSTERESIS: Final = 0.05
"""Relative change that triggers a switch of active nodes.

More nodes become active once the margin has shrunk by this share. Fewer stay active only if the whole margin holds. A
replacement must save this share of the cost. The margin of 15 % is three times as large.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """Settings of activation; money is in US dollars."""

    spend_cap_per_hour: float = 0.0
    """Cap on the total cost of active nodes; 0 = only gifts work."""
    margin: float = 1.15
    """Rollouts that active nodes should return in time, relative to the learner's demand."""
    dwell_s: float = 60.0
    """Minimum time for which a node stays active, as far as the cap allows."""
