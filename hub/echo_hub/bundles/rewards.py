"""Recompute the prompts and rewards of a bundle's rollouts with the run's own task, in the hub's scorer processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Final

import numpy as np

from echo_hub.bundles.blocks import BundledGroup
from echo_hub.bundles.discrepancies import Discrepancies, DiscrepancyKind
from echo_hub.bundles.episodes import BundledTurn
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_shared.errors import ConfigError, ScorerError

_CLOSE: Final = 1e-9
"""Largest relative difference between two results of the same scorer that count as equal. Other versions of libraries
may add numbers in another order."""


@dataclass(slots=True, kw_only=True)
class RewardCounts:
    """Numbers of items that this check has compared so far."""

    prompts: int = 0
    rewards: int = 0
    answers: int = 0
    """Number of compared answers of the environment to turns."""
    failed: int = 0
    """Number of rollouts on which the scorer failed during this check."""
    last_failure: str = ""


class RewardCheck:
    """Compares the prompts, rewards and environment's answers in the bundle with those that the task gives on this
    machine."""

    def __init__(
        self, problems: Problems, pool: ScoringPool, *, has_judges: bool, discrepancies: Discrepancies
    ) -> None:
        self._problems = problems
        self._pool = pool
        self._has_judges = has_judges
        self._discrepancies = discrepancies
        self.counts = RewardCounts()

    def take_prompt(self, group: BundledGroup) -> None:
        """Compare a group's prompt with the one that follows from the task, run.seed and the group's id."""
        self.counts.prompts += 1
        try:
            own = self._problems.prompt_ids(group.group_id)
        except ConfigError as error:
            self._discrepancies.add(
                DiscrepancyKind.PROMPT, f"group {group.group_id}", f"it has no prompt here: {error.brief}"
            )
            return
        if not np.array_equal(own, group.prompt_ids):
            text = f"its prompt of {len(group.prompt_ids)} tokens is not the one that the task gives here"
            self._discrepancies.add(DiscrepancyKind.PROMPT, f"group {group.group_id}", text)

    async def take(self, turns: Sequence[BundledTurn]) -> None:
        """Score turns that the hub has scored or answered. Raises ScorerError if no turn can be scored."""
        scored = [turn for turn in turns if turn.rollout.reward is not None or len(turn.payload.observation_ids)]
        responses = await self._pool.call("respond", [turn.scoring for turn in scored])
        for turn, response in zip(scored, responses, strict=True):
            if isinstance(response, ScorerError):
                self.counts.failed += 1
                self.counts.last_failure = f"{turn.rollout.rollout_id}: {response.brief}"
            elif isinstance(response, Sequence):
                self._compare_answer(turn, EnvironmentReply(*response))
            else:
                self._compare_reward(turn, response)

    def _compare_answer(self, turn: BundledTurn, own: EnvironmentReply) -> None:
        self.counts.answers += 1
        place = f"rollout {turn.rollout.rollout_id}"
        if not np.array_equal(own.observation_ids, turn.payload.observation_ids):
            self._discrepancies.add(DiscrepancyKind.REWARD, place, "the environment answers it otherwise here")
        elif not isclose(own.turn_reward, turn.rollout.turn_reward or 0.0, rel_tol=_CLOSE, abs_tol=_CLOSE):
            text = f"its turn earned {turn.rollout.turn_reward}, here {own.turn_reward:.9g}"
            self._discrepancies.add(DiscrepancyKind.REWARD, place, text)

    def _compare_reward(self, turn: BundledTurn, response: float | Mapping[str, float]) -> None:
        if self._has_judges:
            return
        self.counts.rewards += 1
        weighing = self._problems.weighing(turn.group.group_id)
        own = float(weighing.total(response) if isinstance(response, Mapping) else response)
        said = turn.rollout.reward
        if said is None or not isclose(own, said, rel_tol=_CLOSE, abs_tol=_CLOSE):
            text = f"its recorded reward is {said}, the task gives {own:.9g} here"
            self._discrepancies.add(DiscrepancyKind.REWARD, f"rollout {turn.rollout.rollout_id}", text)
