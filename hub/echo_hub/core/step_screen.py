"""The learner's screening of a step's rollouts under its own policy, as reported to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_hub.core.trust.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScreen:
    """Screening of one batch.

    Groups and rollouts are named by position in `group_ids` and `rollout_ids` of the step's `StepPlanned`. Screening
    the same batch again gives the same result.
    """

    left_out: tuple[int, ...] = ()
    """Groups left out of the step, because no honest engine could have claimed what one of their rollouts claims."""
    suspects: tuple[int, ...] = ()
    """Rollouts that caused a group to be left out, or an update to be held back.

    For an episode of several turns, all its turns are listed. `screened` tells them apart.
    """
    screened: Mapping[int, Evidence] = field(default_factory=dict)
    """Evidence of each computed rollout, in the learner's precision.

    The learner's policy is up to max_staleness steps newer than the sampling policy. Groups without advantage are not
    computed.
    """

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
