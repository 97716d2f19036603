"""Episodes as token ids: prompts of later turns, rollouts to score and to check, and training batches.

No text is tokenised twice: a conversation is the prompt's ids, followed for each turn by the ids that a node drew and
the stored ids of the environment's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import nan
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import DrawnTurn
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.answer_groups import is_answer
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.learner.settings import TrainingGroup, TrainingRollout
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.plain_prompts import plain_prompts
from echo_hub.scoring.asked import AskedGroup, AskedGroups
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.scorer import ScoringJob
from echo_hub.sessions.turns import PlayedTurn
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
from echo_shared.wire.messages import FinishReason
from echo_shared.wire.routes import joined_routes

PROMPTS: Final = 256
"""Number of problems whose prompts are used to measure how much engines differ by rounding."""


def conversation(prompt_ids: NDArray[np.int32], turns: Sequence[AnsweredTurn]) -> NDArray[np.int32]:
    """Return the prompt of the turn that follows these turns."""
    return np.concatenate(
        [prompt_ids, *(part for turn in turns for part in (turn.completion_ids, turn.observation_ids))]
    )


class ScoringJobs:
    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    async def load(self, rollout_ids: Sequence[str]) -> list[ScoringJob]:
        """Return these rollouts for scoring. Rollouts dropped since they were queued are left out."""
        return [scoring_job(stored) for stored in await self._store.read(read_payloads, rollout_ids)]


class DrawnRollouts:
    """Reads committed rollouts for the verifier and for nodes that check other nodes."""

    def __init__(
        self, store: AsyncStore, problems: Problems, asked: AskedGroups, *, run_seed: int, codec: PromptCodec
    ) -> None:
        self._codec = codec
        self._store = store
        self._problems = problems
        self._asked = asked
        self._run_seed = run_seed

    async def load(self, rollout_ids: Sequence[str]) -> dict[str, DrawnRollout | str]:
        """Return each rollout, or the reason why it cannot be checked. Rollouts whose tokens were deleted are left
        out."""
        found = await self._store.read(read_draws, rollout_ids)
        asked = await self._asked.load([draw.stored.group_id for draw in found if is_answer(draw.stored.group_id)])
        # Use a thread: a problem that is not in the cache is sampled again.
        return await asyncio.to_thread(self._drawn, found, asked)

    def _drawn(self, found: Sequence[StoredDraw], asked: Mapping[int, AskedGroup]) -> dict[str, DrawnRollout | str]:
        return {
            draw.stored.rollout_id: answered_rollout(draw, asked.get(draw.stored.group_id))
            if is_answer(draw.stored.group_id)
            else drawn_rollout(draw, self._problems, run_seed=self._run_seed)
            for draw in found
        }

    def prompts(self) -> list[NDArray[np.int32]]:
        """Return the prompts of the run's first `PROMPTS` problems; plain ones for a run without a task. Blocks the
        thread."""
        if not self._problems.tasks:
            return plain_prompts(self._codec)
        return [self._problems.prompt_ids(number) for number in range(PROMPTS)]


def drawn_rollout(draw: StoredDraw, problems: Problems, *, run_seed: int) -> DrawnRollout | str:
    """Return a committed rollout for the verifier, or why it cannot be checked."""
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


def answered_rollout(draw: StoredDraw, asked: AskedGroup | None) -> DrawnRollout | str:
    """Return a committed rollout of a tenant's request for the verifier, or why it cannot be checked."""
    if asked is None:
        return "The request that it answers is not kept any more."
    stored = draw.stored
    return DrawnRollout(
        rollout_id=stored.rollout_id,
        prompt_ids=asked.prompt_ids,
        **stored.payload.content(),
        spans=stored.payload.spans,
        seed=turn_seed(asked.seed, draw.turn, draw.scorer_failures),
        index=draw.index,
        is_greedy=asked.sampling.is_greedy,
        temperature=asked.sampling.temperature,
    )


class TrainingBatches:
    def __init__(self, store: AsyncStore, problems: Problems) -> None:
        self._store = store
        self._problems = problems

    async def batch(self, step: int) -> list[TrainingGroup]:
        """Return the batch planned for a step, in training order."""
        return [self._for_training(group) for group in await self._store.read(read_batch, step)]

    async def groups(self, wanted: Mapping[int, Sequence[str]]) -> dict[int, TrainingGroup]:
        """Return complete groups with their rollouts in training order, without groups that were dropped meanwhile.
        `wanted`: rollout ids by group."""
        return {group.group_id: self._for_training(group) for group in await self._store.read(read_groups, wanted)}

    def at_hand(self, group_id: int, turns: Sequence[DrawnTurn]) -> TrainingGroup:
        """Return a group of one-turn episodes, made from memory and without rewards; otherwise equal to what the store
        would return."""
        return TrainingGroup(
            prompt_ids=self._problems.prompt_ids(group_id), rollouts=tuple(map(_unscored_rollout, turns))
        )

    def _for_training(self, group: BatchGroup) -> TrainingGroup:
        return TrainingGroup(
            prompt_ids=self._problems.prompt_ids(group.group_id),
            rollouts=tuple(map(training_rollout, group.episodes)),
        )


def scoring_job(stored: StoredPayload) -> ScoringJob:
    return ScoringJob(
        rollout_id=stored.rollout_id,
        group_id=stored.group_id,
        earlier_turns=tuple(turn.completion_ids for turn in stored.earlier_turns),
        observed_tokens=sum(len(turn.observation_ids) for turn in stored.earlier_turns),
        played=tuple(
            PlayedTurn(
                completion_ids=turn.completion_ids,
                finish_reason=turn.finish_reason.value,
                logprobs=turn.behavior_logprobs,
                observation_ids=turn.observation_ids,
            )
            for turn in stored.earlier_turns
        ),
        payload=stored.payload,
    )


def training_rollout(episode: BatchEpisode) -> TrainingRollout:
    """Return the episode as one sequence. The environment's tokens have log-probability 0 and are masked out of the
    loss.

    An episode counts as truncated if one of its turns was cut off at sampling.max_tokens, because the later turns
    answer a fragment. An episode that ended because its next turn would not fit the base's context is not truncated:
    its turns are whole, and the environment set its reward.
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
            "routes": joined_routes([(turn, len(turn.observation_ids)) for turn in turns]),
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
