"""Get answers to episodes that the hub samples itself, if they are played in sessions.

Sessions answer in any order, and each holds a slot of the session host until its episode has ended. So an evaluation
continues with answered episodes while others wait for a slot. It uses a quarter of the run's slots,
like evaluations by nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, assert_never

from echo_hub.core.policy.session_slots import EVALUATION_SLOTS
from echo_hub.evaluation.by_hub import AGAIN, Answer, AnswerScorer, Episode, played, scored_by
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.session_scorer import SessionScorer
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import Diverged, EpisodeEnd, Lost, NextTurn, PlayedTurn, SessionKey
from echo_shared.errors import ScorerError

TOGETHER_S: Final = 0.02
"""Seconds for which answers are collected before they are returned, so that the next turns of several episodes are
sampled together."""


class SessionJudge:
    """An `EpisodeJudge` that asks sessions for answers. For tasks without state, it asks the scorer `others`."""

    def __init__(
        self,
        sessions: SessionScorer,
        problems: Problems,
        *,
        others: AnswerScorer,
        losses: int,
        share: int = EVALUATION_SLOTS,
    ) -> None:
        """`losses` is the number of lost sessions that end an episode. The judge uses one in `share` slots; with 1, it
        uses all slots."""
        self._sessions = sessions
        self._problems = problems
        self._others = others
        self._losses = losses
        self._places = asyncio.Semaphore(max(1, sessions.host.slots // share))
        self._begun: dict[tuple[int, int], Episode] = {}
        """Episodes that hold a slot, by group id and index in the group."""
        self._asked: dict[asyncio.Task[Answer], Episode] = {}

    async def answers(self, drawn: Sequence[Episode]) -> list[tuple[Episode, Answer]]:
        """Take episodes whose newest turn was just sampled. Return the episodes that are answered now, at least one."""
        plain = [episode for episode in drawn if not self._sessions.plays(episode.group_id)]
        for episode in drawn:
            if self._sessions.plays(episode.group_id):
                self._asked[asyncio.create_task(self._answer(episode))] = episode
        if plain:
            return list(zip(plain, await self._others([played(episode) for episode in plain]), strict=True))
        await asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(TOGETHER_S)
        return [(self._asked.pop(task), task.result()) for task in [task for task in self._asked if task.done()]]

    async def close(self) -> None:
        """Cancel all pending requests for answers, and close the sessions of all unfinished episodes."""
        for task in self._asked:
            task.cancel()
        if self._asked:
            await asyncio.wait(self._asked)
        self._asked.clear()
        for episode in list(self._begun.values()):
            self._end(episode)

    async def _answer(self, episode: Episode) -> Answer:
        if (episode.group_id, episode.index) not in self._begun:
            await self._places.acquire()
            self._begun[episode.group_id, episode.index] = episode
        try:
            answer = await self._respond(episode)
        except ScorerError as error:
            answer = error
        if isinstance(answer, float | ScorerError):
            self._end(episode)
        return answer

    async def _respond(self, episode: Episode) -> Answer:
        key, turns = _key(episode), played_turns(episode)
        task, problem, seed = await asyncio.to_thread(self._problems.session_of, episode.group_id)
        answer = await self._sessions.host.respond(key, task, problem=problem, seed=seed, turns=turns)
        match answer:
            case NextTurn() | EpisodeEnd():
                return await self._sessions.settled(key, turns, answer)
            case Diverged():
                if self._is_lost_for_good(episode, is_loss=answer.is_loss):
                    return await self._sessions.lost(key, turns)
                episode.cut_behind(answer.turn)
                return await self._sessions.settled(key, turns[: answer.turn + 1], answer.answer)
            case Lost():
                if self._is_lost_for_good(episode, is_loss=answer.is_loss):
                    return await self._sessions.lost(key, turns)
                episode.begin_again()
                return AGAIN
            case _:
                assert_never(answer)

    def _is_lost_for_good(self, episode: Episode, *, is_loss: bool) -> bool:
        episode.losses += is_loss
        return is_loss and episode.losses >= self._losses

    def _end(self, episode: Episode) -> None:
        self._sessions.host.close(_key(episode))
        if self._begun.pop((episode.group_id, episode.index), None) is not None:
            self._places.release()


def judged_by(
    pool: ScoringPool, sessions: SessionHost | None, problems: Problems, *, losses: int, share: int = EVALUATION_SLOTS
) -> AnswerScorer | SessionJudge:
    """Return a scorer of held-out episodes. It uses the processes of `pool`, and the run's session host if one exists.
    For `losses` and `share`, see `SessionJudge`."""
    others = scored_by(pool)
    if sessions is None:
        return others
    scorer = SessionScorer(sessions, problems, pool)
    return SessionJudge(scorer, problems, others=others, losses=losses, share=share)


def played_turns(episode: Episode) -> list[PlayedTurn]:
    """Return the episode's turns, with the environment's answers so far."""
    answers = [*episode.observations, None]
    return [
        PlayedTurn(
            completion_ids=rollout.completion_ids,
            finish_reason=rollout.finish_reason.value,
            logprobs=rollout.behavior_logprobs,
            **({} if observed is None else {"observation_ids": observed}),
        )
        for rollout, observed in zip(episode.rollouts, answers, strict=True)
    ]


def _key(episode: Episode) -> SessionKey:
    return SessionKey(episode.group_id, episode.index, episode.attempt)
