"""Verification and reward of committed rollouts, off the event loop, in batches."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from echo_hub.core.events import RolloutRejected, RolloutScored
from echo_hub.core.payload import RolloutPayload
from echo_hub.verify.checks import SamplingBounds, check_payload
from echo_hub.verify.problems import Problems
from echo_shared.errors import RemoteProtocolError
from echo_shared.messages import DropReason

log = logging.getLogger(__name__)

Verdict = RolloutScored | RolloutRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringJob:
    """One committed rollout."""

    rollout_id: str
    group_id: int
    payload: RolloutPayload


class Scorer:
    """Takes ids, gives verdicts. Its queue holds at most what is leased, so it needs no bound of its own."""

    def __init__(
        self,
        *,
        problems: Problems,
        bounds: SamplingBounds,
        load: Callable[[Sequence[str]], Awaitable[Sequence[ScoringJob]]],
    ) -> None:
        self._problems = problems
        self._bounds = bounds
        self._load = load
        self._waiting: asyncio.Queue[str] = asyncio.Queue()

    def submit(self, rollout_id: str) -> None:
        self._waiting.put_nowait(rollout_id)

    async def run(self, report: Callable[[Verdict], Awaitable[None]]) -> None:
        """Scores for ever; whatever waits is loaded and scored in one go."""
        while True:
            ids = [await self._waiting.get()]
            while not self._waiting.empty():
                ids.append(self._waiting.get_nowait())
            jobs = await self._load(ids)
            for verdict in await asyncio.to_thread(self._judge_all, jobs):
                await report(verdict)

    def _judge_all(self, jobs: Sequence[ScoringJob]) -> list[Verdict]:
        return [self._judge(job) for job in jobs]

    def _judge(self, job: ScoringJob) -> Verdict:
        try:
            check_payload(job.payload, self._bounds)
        except RemoteProtocolError as error:
            return RolloutRejected(rollout_id=job.rollout_id, reason=DropReason.INVALID, detail=str(error))
        try:
            reward = self._problems.reward(job.group_id, job.payload.completion_ids)
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
        except Exception as error:
            # A task is a plug-in: whatever it raises is its failure, never a reward and never the hub's end.
            log.exception("the scorer failed on rollout %s", job.rollout_id)
            return RolloutRejected(rollout_id=job.rollout_id, reason=DropReason.SCORER_FAILED, detail=repr(error))
        return RolloutScored(rollout_id=job.rollout_id, reward=reward)
