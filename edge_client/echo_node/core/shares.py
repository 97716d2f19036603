"""Chooses the hub to work for next, by the shares that the owner gives.

    worked for: A 40 min of share 2 = 20, B 15 min of share 1 = 15   ->   B is next

Only time with work counts, and older time counts less and less. Thus a hub that was absent for a month does not get the
node for a month.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

HALF_LIFE_S: Final = 86_400.0
"""Seconds after which worked time counts half."""


class HubShare(BaseModel):
    """One hub's share of the node's time, and the time worked for this hub."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    share: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """Weight relative to the other hubs; 0 = the node does not work for this hub."""
    worked_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of work for this hub, as counted at the time `at`: older seconds count less."""
    at: float = 0.0
    """Time for which `worked_s` is valid, in seconds since the epoch."""

    def counted_s(self, now: float) -> float:
        """Return the seconds of work that count at `now`. A clock that was set back does not increase them."""
        return self.worked_s * math.exp2(-max(0.0, now - self.at) / HALF_LIFE_S)

    def worked(self, seconds: float, now: float) -> HubShare:
        return self.model_copy(update={"worked_s": self.counted_s(now) + seconds, "at": now})


def next_hub(hubs: Mapping[str, HubShare], *, away: Set[str], now: float) -> str | None:
    """Return the hub furthest below its share, except those in `away`; None = there is none."""
    candidates = {hub: one for hub, one in hubs.items() if one.share > 0 and hub not in away}
    return min(candidates, key=lambda hub: (candidates[hub].counted_s(now) / candidates[hub].share, hub), default=None)
