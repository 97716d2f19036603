"""Numbers that a step takes over from earlier steps, in addition to policy and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The history, equal at all ranks (processes) of a learner."""

    norms: tuple[float, ...] = ()
    """Gradient norms of the newest updates: `echo_hub.learner.norms`."""
    newest_entropy: float | None = None
    """Entropy that the newest step with trained tokens measured, in nats per token. `echo_hub.learner.entropy` adapts
    the bonus to it.
    """
    entropy_coefficient: float | None = None
    """The entropy coefficient c of the newest step; None if the objective has no entropy target."""

    def frame(self) -> dict[str, Any]:
        """Return the history as JSON values, for a checkpoint or another rank."""
        return {**asdict(self), "norms": list(self.norms)}

    @classmethod
    def of_frame(cls, frame: Mapping[str, Any]) -> History:
        """Read a result of `frame`. Missing fields get the values that they have at a run's start."""
        return cls(
            norms=tuple(frame.get("norms", ())),
            newest_entropy=frame.get("newest_entropy"),
            entropy_coefficient=frame.get("entropy_coefficient"),
        )


NO_HISTORY = History()
