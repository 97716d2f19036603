"""Ids of evaluation groups: the id encodes version, problem and kind of sampling.

The ids lie above all training groups, which count from 0, and below those of tenants' samples (`answer_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_hub.core.answer_groups import FIRST_ANSWER_ID

FIRST_EVALUATION_ID: Final = 2**48
"""Smallest id of an evaluation group."""
_PROBLEMS: Final = 2**17
"""Number of group ids reserved per version and kind of sampling: more than the setting `evaluation.problems` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationGroup:
    """The completions of one held-out problem by one version: the greedy one or, without `greedy`, all sampled ones."""

    policy_version: int
    greedy: bool
    number: int

    @classmethod
    def of(cls, group_id: int) -> EvaluationGroup | None:
        """Decode a group id; None for another kind of group."""
        if not FIRST_EVALUATION_ID <= group_id < FIRST_ANSWER_ID:
            return None
        of_version, number = divmod(group_id - FIRST_EVALUATION_ID, _PROBLEMS)
        return cls(policy_version=of_version // 2, greedy=of_version % 2 == 0, number=number)

    @property
    def group_id(self) -> int:
        return FIRST_EVALUATION_ID + (2 * self.policy_version + (not self.greedy)) * _PROBLEMS + self.number


def evaluation_ids(policy_version: int) -> range:
    """Return the range that contains every group id of this version's evaluation."""
    first = EvaluationGroup(policy_version=policy_version, greedy=True, number=0).group_id
    return range(first, first + 2 * _PROBLEMS)
