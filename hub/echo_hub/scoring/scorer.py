"""Check and score received and stored rollouts in batches, off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import FirstTurn
from echo_hub.core.accounting.events import RolloutContinued, RolloutRejected, RolloutScored
from echo_hub.driving.event_queue import EventQueue
from echo_hub.scoring.backlog import Backlog
from echo_hub.scoring.checks import SamplingBounds, check_payload
from echo_hub.scoring.pool import PART_CALLS, ScorerDeath, ScoringPool
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_shared.errors import RemoteProtocolError, ScorerError
from echo_shared.records.rewards import components_of
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

SOON_TOKENS: Final = 16_384
"""Checks of at most this many tokens run on the event loop, because they take less than a millisecond."""

Verdict = RolloutScored | RolloutContinued | RolloutRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringJob:
    """A stored rollout that waits for its score."""

    rollout_id: str
    group_id: int
    earlier_turns: tuple[NDArray[np.int32], ...] = ()
    """Completions of the earlier turns of the rollout's episode."""
    observed_tokens: int = 0
    """Number of tokens with which the environment answered these turns."""
    payload: RolloutPayload


class CommittedRollouts(Protocol):
    """Loads rollouts from the store. Implemented by `echo_hub.intake.episodes.ScoringJobs`."""

    async def load(self, rollout_ids: Sequence[str]) -> Sequence[ScoringJob]:
        """Return the rollouts, except those that were dropped in the meantime."""


class Scorer:
    """Turns rollouts into verdicts: score, next turn, or refusal. The number of leased rollouts limits its queue."""

    def __init__(
        self,
        *,
        pool: ScoringPool,
        bounds: SamplingBounds,
        committed: CommittedRollouts,
        queue: EventQueue,
        backlog: Backlog,
    ) -> None:
        """`queue` receives the verdicts. `backlog` counts the rollouts that have no verdict yet."""
        self._pool = pool
        self._bounds = bounds
        self._committed = committed
        self._queue = queue
        self._backlog = backlog
        self._waiting: asyncio.Queue[ScoringJob | str] = asyncio.Queue()
        self._num_failed = 0

    def submit(self, rollout_id: str, first_turn: FirstTurn | None = None) -> None:
        """Queue a rollout. `first_turn` gives its content; if None, the rollout is loaded from the store."""
        self._backlog.num_open += 1
        if first_turn is None:
            self._waiting.put_nowait(rollout_id)
        else:
            job = ScoringJob(rollout_id=rollout_id, group_id=first_turn.group_id, payload=first_turn.payload)
            self._waiting.put_nowait(job)

    async def run(self) -> None:
        """Score until cancelled. All waiting rollouts are loaded together. Raises ScorerError if nothing can be scored.

        Verdicts are returned for each part: `PART_CALLS` rollouts, or one rollout if the run has judges. So a slow call
        does not delay the verdicts of other parts.
        """
        size = 1 if self._pool.has_judges else PART_CALLS
        async with asyncio.TaskGroup() as parts:
            while True:
                waiting = [await self._waiting.get()]
                while not self._waiting.empty():
                    waiting.append(self._waiting.get_nowait())
                jobs = [one for one in waiting if isinstance(one, ScoringJob)]
                if len(jobs) < len(waiting):
                    jobs += await self._committed.load([one for one in waiting if isinstance(one, str)])
                    self._backlog.num_open -= len(waiting) - len(jobs)
                for start in range(0, len(jobs), size):
                    parts.create_task(self._judge(jobs[start : start + size]))

    async def _judge(self, jobs: Sequence[ScoringJob]) -> None:
        num_tokens = sum(len(job.payload.completion_ids) for job in jobs)
        # Check few tokens on the event loop, because a thread would take longer.
        refused = await asyncio.to_thread(self._check_all, jobs) if num_tokens > SOON_TOKENS else self._check_all(jobs)
        possible = [job for job in jobs if job.rollout_id not in refused]
        turns = [
            (job.group_id, [*job.earlier_turns, job.payload.completion_ids], job.observed_tokens) for job in possible
        ]
        responses = await self._pool.rewards("respond", turns)
        verdicts = [_verdict(job, response) for job, response in zip(possible, responses, strict=True)]
        failed = [verdict for verdict in verdicts if isinstance(verdict, RolloutRejected)]
        if failed:
            self._note_failures(len(failed), failed[-1].detail)
        for verdict in (*refused.values(), *verdicts):
            await self._queue.put(verdict)
        self._backlog.num_open -= len(jobs)

    def _note_failures(self, count: int, detail: str) -> None:
        """Log failures, but only the 1st, 2nd, 4th, 8th and so on, because nodes can cause any number of failures and
        choose parts of their texts."""
        before, self._num_failed = self._num_failed, self._num_failed + count
        if self._num_failed.bit_length() > before.bit_length():  # The number has reached the next power of two.
            log.warning("the scorer has failed on %d rollouts so far: %s", self._num_failed, printable_line(detail))

    def _check_all(self, jobs: Sequence[ScoringJob]) -> dict[str, RolloutRejected]:
        """Return a rejection for each payload that no honest backend can send, by rollout id."""
        refused = {}
        for job in jobs:
            try:
                check_payload(job.payload, self._bounds)
            except RemoteProtocolError as error:
                refused[job.rollout_id] = RolloutRejected(
                    rollout_id=job.rollout_id, reason=DropReason.INVALID, detail=str(error)
                )
        return refused


def _verdict(job: ScoringJob, response: float | Sequence[Any] | ScorerError) -> Verdict:
    """Return the verdict on a rollout. For a turn that the environment answered, `response` has the fields of
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
