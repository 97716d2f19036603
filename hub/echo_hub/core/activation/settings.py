"""What activation is told of the run: prices, the cap, the margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HYSTERESIS: Final = 0.05
"""More nodes become active when the margin has shrunk by this share; fewer stay active only if the whole margin is
kept; others take their place only if that saves this share of the cost. The margin of 15 % covers it three times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """All money is in US dollars."""

    spend_cap_per_hour: float = 0.0
    """What all active nodes together may cost; 0 = gifts alone work."""
    margin: float = 1.15
    """The rollouts that active nodes bring back in time, over those that the learner takes."""
    dwell_s: float = 60.0
    """A node that has become active stays so for this long at least, as long as the cap allows it."""
