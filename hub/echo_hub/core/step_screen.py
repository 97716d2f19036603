"""What the learner has seen of a step's rollouts, under its own policy, as the coordinator is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_hub.core.trust.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScreen:
    """Groups and rollouts are named by their places in the step's batch: in the `group_ids` and `rollout_ids` of its
    `StepPlanned`. The same batch is screened the same again."""

    left_out: tuple[int, ...] = ()
    """Groups that the step was computed without: of a rollout of each no honest engine gives what was claimed of it."""
    suspects: tuple[int, ...] = ()
    """Rollouts on whose account groups were left out or an update was held back. Of an episode of several turns, all of
    them: which one it was, `screened` says better."""
    screened: Mapping[int, Evidence] = field(default_factory=dict)
    """Rollouts that were computed, each with how it looks under a policy that is up to max_staleness steps newer than
    the one that drew it, and in the learner's precision. Those of groups without advantage are not computed."""

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> StepScreen:
        """Of the learner's lists, which have the fields' names; `screened` has its evidence beside it."""
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
