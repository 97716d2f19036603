"""Score turns of episodes that are played in sessions: ask the session host for the answer, then weigh the reward
components, as for other tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.events import (
    RolloutContinued,
    RolloutRejected,
    RolloutScored,
    SessionDiverged,
    SessionLost,
)
from echo_hub.core.answer_groups import is_answer
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply, Response
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import Diverged, EpisodeEnd, Lost, NextTurn, PlayedTurn, SessionKey, TurnAnswer
from echo_shared.errors import ScorerError
from echo_shared.records.rewards import components_of
from echo_shared.wire.messages import DropReason

SessionVerdict = RolloutScored | RolloutContinued | RolloutRejected | SessionDiverged | SessionLost


class SessionScorer:
    """Asks the run's session host for the environment's answer to the last turn of a rollout."""

    def __init__(self, host: SessionHost, problems: Problems, pool: ScoringPool) -> None:
        """`pool` asks the judges (models that score completions), if the run has judges."""
        self.host = host
        self._problems = problems
        self._pool = pool

    def plays(self, group_id: int) -> bool:
        """Return True if the group's episodes are played in sessions."""
        return not is_answer(group_id) and self._problems.has_state(group_id)

    async def verdict(self, rollout_id: str, key: SessionKey, turns: Sequence[PlayedTurn]) -> SessionVerdict:
        """Return the verdict on a rollout, which is the last of `turns`. Waits while the environment is away, or has no
        free slot."""
        task, problem, seed = await asyncio.to_thread(self._problems.session_of, key.group_id)
        answer = await self.host.respond(key, task, problem=problem, seed=seed, turns=turns)
        try:
            match answer:
                case NextTurn() | EpisodeEnd():
                    return await self._answered(rollout_id, key, turns, answer)
                case Diverged():
                    return await self._diverged(rollout_id, key, turns, answer)
                case Lost():
                    if_lost = await self._if_lost(rollout_id, key, turns)
                    return SessionLost(
                        rollout_id=rollout_id, if_lost=if_lost, is_loss=answer.is_loss, detail=answer.detail
                    )
                case _:
                    assert_never(answer)
        except ScorerError as error:
            reason = DropReason.SCORER_FAILED
            return RolloutRejected(rollout_id=rollout_id, reason=reason, detail=str(error))

    async def settled(
        self, key: SessionKey, turns: Sequence[PlayedTurn], answer: TurnAnswer
    ) -> float | EnvironmentReply:
        """Convert the session's answer to the last of `turns` into the weighted reward, or into the environment's
        reply. Raises ScorerError for an invalid reward."""
        task = self._problems.tasks[self._problems.task_of(key.group_id)]
        return await self._weighed(key, turns, task.settled(answer, _completions(turns)))

    async def lost(self, key: SessionKey, turns: Sequence[PlayedTurn]) -> float:
        """Return the weighted reward of an episode whose session was lost too often. Raises ScorerError if the
        environment declares an invalid reward for this case."""
        task = self._problems.tasks[self._problems.task_of(key.group_id)]
        weighed = await self._weighed(key, turns, task.lost(_completions(turns)))
        assert not isinstance(weighed, EnvironmentReply), "a lost episode does not go on"
        return weighed

    async def _weighed(
        self, key: SessionKey, turns: Sequence[PlayedTurn], response: Response
    ) -> float | EnvironmentReply:
        if isinstance(response, EnvironmentReply):
            return response
        weighed = await self._pool.weighed(key.group_id, _completions(turns), response)
        if isinstance(weighed, ScorerError):
            raise weighed
        return weighed

    async def _answered(
        self, rollout_id: str, key: SessionKey, turns: Sequence[PlayedTurn], answer: TurnAnswer
    ) -> RolloutScored | RolloutContinued:
        settled = await self.settled(key, turns, answer)
        if isinstance(settled, EnvironmentReply):
            return RolloutContinued(
                rollout_id=rollout_id,
                observation_ids=settled.observation_ids,
                turn_reward=settled.turn_reward,
            )
        return _scored(rollout_id, settled)

    async def _diverged(
        self, rollout_id: str, key: SessionKey, turns: Sequence[PlayedTurn], diverged: Diverged
    ) -> SessionDiverged:
        if_lost = await self._if_lost(rollout_id, key, turns)
        settled = await self.settled(key, turns[: diverged.turn + 1], diverged.answer)
        if isinstance(settled, EnvironmentReply):
            return SessionDiverged(
                rollout_id=rollout_id,
                turn=diverged.turn,
                observation_ids=settled.observation_ids,
                turn_reward=settled.turn_reward,
                if_lost=if_lost,
                is_loss=diverged.is_loss,
            )
        ended = _scored(rollout_id, settled)
        return SessionDiverged(
            rollout_id=rollout_id,
            turn=diverged.turn,
            reward=ended.reward,
            components=ended.components,
            if_lost=if_lost,
            is_loss=diverged.is_loss,
        )

    async def _if_lost(self, rollout_id: str, key: SessionKey, turns: Sequence[PlayedTurn]) -> RolloutScored:
        return _scored(rollout_id, await self.lost(key, turns))


def _completions(turns: Sequence[PlayedTurn]) -> list[NDArray[np.int32]]:
    return [turn.completion_ids for turn in turns]


def _scored(rollout_id: str, reward: float) -> RolloutScored:
    return RolloutScored(rollout_id=rollout_id, reward=float(reward), components=components_of(reward))
