"""What a step takes over from those before it, beside policy and optimizer: numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Every rank of a learner has the same."""

    norms: tuple[float, ...] = ()
    """Of the gradients of the newest updates: `echo_hub.learner.norms`."""
    newest_entropy: float | None = None
    """What the newest step with trained tokens has measured, nats per token: `echo_hub.learner.entropy`."""
    entropy_coefficient: float | None = None
    """The newest one that followed a target; None: there was no target."""

    def frame(self) -> dict[str, Any]:
        """As JSON and frames have it."""
        return {**asdict(self), "norms": list(self.norms)}

    @classmethod
    def of_frame(cls, frame: Mapping[str, Any]) -> History:
        """What `frame` gave; fields that it lacks are as at a run's beginning."""
        return cls(
            norms=tuple(frame.get("norms", ())),
            newest_entropy=frame.get("newest_entropy"),
            entropy_coefficient=frame.get("entropy_coefficient"),
        )


NO_HISTORY = History()
"""Of a run's first step."""
