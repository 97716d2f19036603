"""Check and score received and stored rollouts in batches, off the event loop.

Samples of tenants' requests are only checked: no task scores them, so their reward is 0. If a task has sessions, each
turn is checked first, and then answered by the session host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import FirstTurn
from echo_hub.core.accounting.events import RolloutContinued, RolloutRejected, RolloutScored
from echo_hub.core.answer_groups import is_answer
from echo_hub.driving.event_queue import EventQueue
from echo_hub.scoring.asked import GroupBounds
from echo_hub.scoring.backlog import Backlog
from echo_hub.scoring.checks import check_payload
from echo_hub.scoring.pool import PART_CALLS, ScorerDeath, ScoringPool
from echo_hub.scoring.session_scorer import SessionScorer
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_hub.sessions.turns import PlayedTurn, SessionKey
from echo_shared.errors import RemoteProtocolError, ScorerError
from echo_shared.records.rewards import components_of
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

SOON_TOKENS: Final = 16_384
"""Largest number of tokens that are checked on the event loop. To check these takes less than a millisecond."""

Verdict = RolloutScored | RolloutContinued | RolloutRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringJob:
    """A stored rollout that waits for its score."""

    rollout_id: str
    group_id: int
    earlier_turns: tuple[NDArray[np.int32], ...] = ()
    """Completions of the earlier turns of the rollout's episode."""
    observed_tokens: int = 0
    """Number of tokens with which the environment answered the episode's earlier turns."""
    played: tuple[PlayedTurn, ...] = ()
    """The episode's earlier turns with the environment's answers; only for an environment with state."""
    attempt: int = 0
    """Number of times that the episode was restarted because its session was lost."""
    payload: RolloutPayload

    @property
    def session_key(self) -> SessionKey:
        return SessionKey(self.group_id, int(self.rollout_id.partition("-")[2]), self.attempt)

    @property
    def turns(self) -> tuple[PlayedTurn, ...]:
        """All turns of the episode, in the form that sessions take. The last one is this rollout, which the environment
        has not answered yet.
        """
        payload = self.payload
        newest = PlayedTurn(
            completion_ids=payload.completion_ids,
            finish_reason=payload.finish_reason.value,
            logprobs=payload.behavior_logprobs,
        )
        return (*self.played, newest)


class _Submitted(NamedTuple):
    """A submitted rollout without a verdict."""

    rollout_id: str
    attempt: int


class CommittedRollouts(Protocol):
    """Loads rollouts from the store. Implemented by `echo_hub.intake.episodes.ScoringJobs`."""

    async def load(self, rollout_ids: Sequence[str]) -> Sequence[ScoringJob]:
        """Return the rollouts with these ids. Rollouts that were dropped in the meantime are left out."""


class Scorer:
    """Gives each rollout its verdict: a score, a next turn, or a refusal. The number of leased rollouts limits the
    length of the queue."""

    def __init__(
        self,
        *,
        pool: ScoringPool,
        bounds: GroupBounds,
        committed: CommittedRollouts,
        queue: EventQueue,
        backlog: Backlog,
        sessions: SessionScorer | None = None,
    ) -> None:
        """`queue` receives the verdicts. `backlog` counts the rollouts without a verdict, except turns of sessions,
        which may wait for a slot. `sessions` scores the turns of sessions; None if the run has none."""
        self._pool = pool
        self._bounds = bounds
        self._committed = committed
        self._queue = queue
        self._backlog = backlog
        self._sessions = sessions
        self._waiting: asyncio.Queue[ScoringJob | _Submitted] = asyncio.Queue()
        self._num_failed = 0

    def submit(self, rollout_id: str, first_turn: FirstTurn | None = None, *, attempt: int = 0) -> None:
        """Queue a rollout. `first_turn` gives its content; if None, the rollout is loaded from the store. `attempt` is
        the number of times that the episode was restarted because its session was lost."""
        self._backlog.num_open += 1
        if first_turn is None:
            self._waiting.put_nowait(_Submitted(rollout_id, attempt))
        else:
            group_id, payload = first_turn.group_id, first_turn.payload
            job = ScoringJob(rollout_id=rollout_id, group_id=group_id, attempt=attempt, payload=payload)
            self._waiting.put_nowait(job)

    async def run(self) -> None:
        """Score until cancelled. All waiting rollouts are loaded together. Raises ScorerError if no rollout can be
        scored at all.

        The verdicts of each part are reported at once. A part is `PART_CALLS` rollouts, or one rollout if the run has
        judges. So a slow call delays no other part.
        """
        size = 1 if self._pool.has_judges else PART_CALLS
        async with asyncio.TaskGroup() as parts:
            while True:
                waiting = [await self._waiting.get()]
                while not self._waiting.empty():
                    waiting.append(self._waiting.get_nowait())
                jobs = [one for one in waiting if isinstance(one, ScoringJob)]
                if len(jobs) < len(waiting):
                    attempts = dict(one for one in waiting if isinstance(one, _Submitted))
                    loaded = await self._committed.load(list(attempts))
                    jobs += [replace(job, attempt=attempts[job.rollout_id]) for job in loaded]
                    self._backlog.num_open -= len(waiting) - len(jobs)
                if self._sessions is not None:
                    for job in [job for job in jobs if self._sessions.plays(job.group_id)]:
                        jobs.remove(job)
                        self._backlog.num_open -= 1
                        parts.create_task(self._play(self._sessions, job))
                for start in range(0, len(jobs), size):
                    parts.create_task(self._judge(jobs[start : start + size]))

    async def _judge(self, jobs: Sequence[ScoringJob]) -> None:
        num_tokens = sum(len(job.payload.completion_ids) for job in jobs)
        # Check few tokens on the event loop: a thread would take longer.
        refused = await asyncio.to_thread(self._check_all, jobs) if num_tokens > SOON_TOKENS else self._check_all(jobs)
        answers = [job for job in jobs if is_answer(job.group_id) and job.rollout_id not in refused]
        possible = [job for job in jobs if not is_answer(job.group_id) and job.rollout_id not in refused]
        turns = [
            (job.group_id, [*job.earlier_turns, job.payload.completion_ids], job.observed_tokens) for job in possible
        ]
        responses = await self._pool.rewards("respond", turns) if turns else []
        verdicts = [_verdict(job, response) for job, response in zip(possible, responses, strict=True)]
        failed = [verdict for verdict in verdicts if isinstance(verdict, RolloutRejected)]
        if failed:
            self._note_failures(len(failed), failed[-1].detail)
        # The reward is 0: a tenant scores its samples itself.
        unscored = [RolloutScored(rollout_id=job.rollout_id, reward=0.0) for job in answers]
        for verdict in (*refused.values(), *unscored, *verdicts):
            await self._queue.put(verdict)
        self._backlog.num_open -= len(jobs)

    async def _play(self, sessions: SessionScorer, job: ScoringJob) -> None:
        refused = self._check_all([job])
        verdict = refused.get(job.rollout_id) or await sessions.verdict(job.rollout_id, job.session_key, job.turns)
        if isinstance(verdict, RolloutRejected) and verdict.reason is DropReason.SCORER_FAILED:
            self._note_failures(1, verdict.detail)
        await self._queue.put(verdict)

    def _note_failures(self, count: int, detail: str) -> None:
        """Log failures, but only the 1st, 2nd, 4th, 8th and so on, because nodes can cause any number of failures and
        choose parts of their texts."""
        before, self._num_failed = self._num_failed, self._num_failed + count
        if self._num_failed.bit_length() > before.bit_length():  # The number has reached the next power of two.
            log.warning("the scorer has failed on %d rollouts so far: %s", self._num_failed, printable_line(detail))

    def _check_all(self, jobs: Sequence[ScoringJob]) -> dict[str, RolloutRejected]:
        """Return the rejections, by rollout id, of all payloads that no honest backend can send."""
        refused = {}
        for job in jobs:
            try:
                check_payload(job.payload, self._bounds.of(job.group_id))
            except RemoteProtocolError as error:
                refused[job.rollout_id] = RolloutRejected(
                    rollout_id=job.rollout_id, reason=DropReason.INVALID, detail=str(error)
                )
        return refused


def _verdict(job: ScoringJob, response: float | Sequence[Any] | ScorerError) -> Verdict:
    """Return the verdict on a rollout. If the environment answered the turn, `response` has the fields of
    `EnvironmentReply`."""
    if isinstance(response, ScorerError):
        detail = str(response)
    elif isinstance(response, Sequence):
        answered = EnvironmentReply(*response)
        return RolloutContinued(
            rollout_id=job.rollout_id,
            observation_ids=answered.observation_ids,
            turn_reward=answered.turn_reward,
        )
    else:
        return RolloutScored(rollout_id=job.rollout_id, reward=float(response), components=components_of(response))
    return RolloutRejected(
        rollout_id=job.rollout_id,
        reason=DropReason.SCORER_FAILED,
        detail=detail,
        killed_scorer=isinstance(response, ScorerDeath),
    )
