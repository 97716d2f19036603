"""Which of several hubs a node works for next, by the shares that its owner has given them.

    worked for: A 40 min of share 2 = 20, B 15 min of share 1 = 15   ->   B is next

Only time counts in which there was work, and what is long past counts less and less: a hub that was away for a month
does not have the node for a month.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

HALF_LIFE_S: Final = 86_400.0
"""After which time worked counts half."""


class HubShare(BaseModel):
    """One hub's share, and what it has had."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    share: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """By weight, beside the other hubs'; 0 = it is not worked for."""
    worked_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that counted at `at`."""
    at: float = 0.0
    """Seconds since the epoch."""

    def counted_s(self, now: float) -> float:
        """What counts now of the seconds worked. A clock that was set back makes nothing of it grow."""
        return self.worked_s * math.exp2(-max(0.0, now - self.at) / HALF_LIFE_S)

    def worked(self, seconds: float, now: float) -> HubShare:
        """So much more."""
        return self.model_copy(update={"worked_s": self.counted_s(now) + seconds, "at": now})


def next_hub(hubs: Mapping[str, HubShare], *, away: Set[str], now: float) -> str | None:
    """The hub that is furthest below its share, of those that are not `away`; None = none has a share."""
    candidates = {hub: one for hub, one in hubs.items() if one.share > 0 and hub not in away}
    return min(candidates, key=lambda hub: (candidates[hub].counted_s(now) / candidates[hub].share, hub), default=None)
