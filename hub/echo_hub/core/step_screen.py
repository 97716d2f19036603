"""What the learner found when it compared a step's rollouts with its own policy, as reported to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_hub.core.trust.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScreen:
    """What the learner found about one batch.

    Groups and rollouts are named by position in `group_ids` and `rollout_ids` of the step's `StepPlanned`. Screening
    the same batch again gives the same result.
    """

    left_out: tuple[int, ...] = ()
    """Groups that the learner left out of the step, because one of their rollouts claims log-probabilities that no
    honest engine can have."""
    suspects: tuple[int, ...] = ()
    """Rollouts that caused a group to be left out, or an update to be held back.

    For an episode of several turns, all its turns are listed; `screened` has evidence about each turn.
    """
    screened: Mapping[int, Evidence] = field(default_factory=dict)
    """Evidence about each rollout that the learner computed, in the learner's precision."""

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> StepScreen:
        """Build the screen from the learner's lists, which have the same names; the evidence is in parallel lists."""
        if not frame:
            return cls()
        evidence = zip(frame["screened"], frame["draws"], frame["claims"], frame["mismatch_kl"], strict=True)
        return cls(
            left_out=tuple(frame["left_out"]),
            suspects=tuple(frame["suspects"]),
            screened={
                place: Evidence(draws=tuple(draws), claims=tuple(claims), mismatch_kl=mismatch)
                for place, draws, claims, mismatch in evidence
            },
        )
