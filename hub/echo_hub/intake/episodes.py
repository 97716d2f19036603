"""Conversations of several turns as token ids: what the next turn is asked with, what is scored, and trained on.

Nothing is ever tokenised twice: a conversation is the prompt's ids, the drawn ids of each turn, and the ids that were
made of each answer of the environment when it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import nan

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.effects import DrawnTurn
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.leasing import turn_seed
from echo_hub.learner.settings import TrainingGroup, TrainingRollout
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.scorer import ScoringJob
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.drawing import StoredDraw, read_draws
from echo_hub.store.reading import (
    AnsweredTurn,
    BatchEpisode,
    BatchGroup,
    BatchTurn,
    StoredPayload,
    read_batch,
    read_groups,
    read_payloads,
)
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.messages import FinishReason


def conversation(prompt_ids: NDArray[np.int32], turns: Sequence[AnsweredTurn]) -> NDArray[np.int32]:
    """All that the turn after `turns` is drawn after."""
    return np.concatenate(
        [prompt_ids, *(part for turn in turns for part in (turn.completion_ids, turn.observation_ids))]
    )


async def load_scoring_jobs(store: AsyncStore, rollout_ids: Sequence[str]) -> list[ScoringJob]:
    """What the scorer is given of committed rollouts; those dropped meanwhile are left out."""
    return [scoring_job(stored) for stored in await store.read(read_payloads, rollout_ids)]


async def load_drawn(
    store: AsyncStore, problems: Problems, rollout_ids: Sequence[str], *, run_seed: int
) -> dict[str, DrawnRollout | str]:
    """What the verifier is given of committed rollouts, or why one cannot be checked; those whose tokens are not kept
    any more are left out."""
    found = await store.read(read_draws, rollout_ids)
    # A problem that is not at hand any more is sampled again.
    return await asyncio.to_thread(
        lambda: {draw.stored.rollout_id: drawn_rollout(draw, problems, run_seed=run_seed) for draw in found}
    )


def drawn_rollout(draw: StoredDraw, problems: Problems, *, run_seed: int) -> DrawnRollout | str:
    """What the verifier is given of a committed rollout, or why it cannot be checked."""
    stored, about = draw.stored, EvaluationGroup.of(draw.stored.group_id)
    group_seed = draw.group_seed if about is None else evaluation_seed(run_seed, about.number)
    if group_seed is None or len(stored.earlier_turns) < draw.turn:
        return "What it was drawn after is not kept any more."
    return DrawnRollout(
        rollout_id=stored.rollout_id,
        prompt_ids=conversation(problems.prompt_ids(stored.group_id), stored.earlier_turns[: draw.turn]),
        **stored.payload.content(),
        spans=stored.payload.spans,
        seed=turn_seed(group_seed, draw.turn, draw.scorer_failures),
        index=draw.index,
        is_greedy=about is not None and about.greedy,
    )


class TrainingBatches:
    """What the learner trains on, from the store."""

    def __init__(self, store: AsyncStore, problems: Problems) -> None:
        self._store = store
        self._problems = problems

    async def batch(self, step: int) -> list[TrainingGroup]:
        """The planned batch of a step, in the order of training."""
        return [self._for_training(group) for group in await self._store.read(read_batch, step)]

    async def groups(self, wanted: Mapping[int, Sequence[str]]) -> dict[int, TrainingGroup]:
        """Groups all of which has come in, with their rollouts in the order of training; those dropped meanwhile are
        left out."""
        return {group.group_id: self._for_training(group) for group in await self._store.read(read_groups, wanted)}

    def at_hand(self, group_id: int, turns: Sequence[DrawnTurn]) -> TrainingGroup:
        """A group that was just handed over, as the store has it: of one turn each, and without rewards."""
        return TrainingGroup(
            prompt_ids=self._problems.prompt_ids(group_id), rollouts=tuple(map(_unscored_rollout, turns))
        )

    def _for_training(self, group: BatchGroup) -> TrainingGroup:
        return TrainingGroup(
            prompt_ids=self._problems.prompt_ids(group.group_id),
            rollouts=tuple(map(training_rollout, group.episodes)),
        )


def scoring_job(stored: StoredPayload) -> ScoringJob:
    """What the scorer is given of a committed rollout."""
    return ScoringJob(
        rollout_id=stored.rollout_id,
        group_id=stored.group_id,
        earlier_turns=tuple(turn.completion_ids for turn in stored.earlier_turns),
        observed_tokens=sum(len(turn.observation_ids) for turn in stored.earlier_turns),
        payload=stored.payload,
    )


def training_rollout(episode: BatchEpisode) -> TrainingRollout:
    """The whole episode as one sequence. What the environment said has no log-probability and is masked out.

    It counts as truncated if any of its turns was cut off at sampling.max_tokens: what followed answers a fragment. An
    episode that ended because the next turn would not fit the base's context does not count: all that it holds is
    whole, and its reward is the one that the environment names for this case.
    """
    turns = [turn.payload for turn in episode.turns]
    content = turns[-1].content()
    masks = [np.ones(len(turns[-1].completion_ids), bool)]
    if len(turns) > 1 or len(turns[0].observation_ids):
        ids, masks, logprobs = [], [], []
        reasons = {turn.finish_reason for turn in turns}
        for turn in turns:
            unseen = len(turn.observation_ids)
            ids += [turn.completion_ids, turn.observation_ids]
            masks += [np.ones(len(turn.completion_ids), bool), np.zeros(unseen, bool)]
            logprobs += [turn.behavior_logprobs, np.zeros(unseen, np.float32)]
        content |= {
            "completion_ids": np.concatenate(ids),
            "behavior_logprobs": np.concatenate(logprobs),
            "finish_reason": FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP,
            "sampling_s": sum(turn.sampling_s for turn in turns),
        }
    return TrainingRollout(
        **content,
        spans=tuple(span for turn in turns for span in turn.spans),
        loss_mask=np.concatenate(masks),
        reward=nan if episode.reward is None else episode.reward,
        turn_rewards=np.array([turn.turn_reward for turn in episode.turns[:-1]], np.float64),
        draws=np.array([(one.seed, one.index, len(one.payload.completion_ids)) for one in episode.turns], np.uint64),
    )


def _unscored_rollout(turn: DrawnTurn) -> TrainingRollout:
    stored = BatchTurn(
        rollout_id=turn.rollout_id,
        seed=turn_seed(turn.group_seed, 0, turn.attempt),
        index=turn.rollout_index,
        payload=turn.payload.attributed(turn.node_id, turn.policy_version),
    )
    return training_rollout(BatchEpisode(turns=(stored,), reward=None))
