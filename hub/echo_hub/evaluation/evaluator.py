"""Sample evaluations in a separate process, on the hub's machine or in its Ray cluster. Loads no torch.

If the process dies or is lost, its finished rollouts are kept and the others are requested from the next process. Each
rollout counts once, and a repeated one is drawn from the same random numbers. Its batch may hold other rollouts, so
rounding changes about one draw in a million.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from echo_hub.cluster.link import ChildLost, ClusterUnusable, RayLink
from echo_hub.cluster.model_processes import ModelProcess, Program, process_of
from echo_hub.evaluation.by_hub import Generated
from echo_hub.evaluation.work_count import WorkCount
from echo_hub.learner import frames, unquantized
from echo_hub.learner.environment import environment
from echo_hub.learner.settings import LearnerSettings
from echo_shared.errors import LearnerError
from echo_shared.process.backoff import Restarts, backoff_s
from echo_shared.process.child import ChildExited
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

log = logging.getLogger(__name__)

KEPT: Final = 2
"""Number of versions' adapters that the process keeps in memory."""
DEATHS_IN_A_ROW: Final = 5
"""Number of process deaths in a row, without a new rollout, after which the evaluation fails."""
LOSSES_IN_A_ROW: Final = 8
"""Number of processes lost in a row, without a new rollout, after which the evaluation fails because a request may
crash machines. Losses count only while the cluster answers."""
RESTART_S: Final = 1.0
"""Seconds before the first restart, reduced at random by up to half. The wait doubles with every further restart, up to
30 s."""
_WORKER: Final = "echo_hub.evaluation.worker"
_Key = tuple[int, int]


def program(settings: LearnerSettings) -> Program:
    module = (_WORKER,) if settings.learner.base_bits else unquantized.command(_WORKER)
    env = environment(settings.learner)
    return Program(kind="evaluator", name="evaluating", module=module, counted="rollouts", env=env)


class Evaluator:
    """Samples versions, for one call of `generate` at a time. The first call starts the process."""

    def __init__(self, process: ModelProcess, *, is_patient: bool = True, count: WorkCount | None = None) -> None:
        """If `is_patient`, wait when the Ray cluster does not answer; otherwise fail. `count` counts the received
        rollouts; its total contains the first turn of every episode."""
        self._process = process
        self._is_patient = is_patient
        self._count = count
        self._first_turns: set[tuple[int, bool, int, int]] = set()
        """Episodes whose first turn is already in the total of `count`, as (version, greedy, problem, index)."""

    @property
    def absence(self) -> str:
        """Return the reason why sampling waits for the cluster; "" if it does not wait."""
        return self._process.absence

    async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
        """Return all rollouts of `requests`. Raises LearnerError if too many processes in a row die or are lost."""
        done = _Done()
        if self._count is not None:
            self._count_later_turns(requests, self._count, greedy=greedy)
        restarts = Restarts(most=DEATHS_IN_A_ROW, first_s=RESTART_S, limit_s=30.0)
        while missing := _without(requests, done.rollouts):
            known = len(done.rollouts)
            try:
                await self._draw(missing, done, adapter=adapter, greedy=greedy)
            except (ChildExited, ChildLost) as error:
                await self._process.stop()
                if len(done.rollouts) > known:
                    restarts.succeeded()
                    done.losses = done.tries = 0
                await asyncio.sleep(self._wait_s(error, done, restarts))
        return Generated(rollouts=list(done.rollouts.values()), seconds=done.seconds)

    async def stop(self) -> None:
        await self._process.stop()

    async def _draw(self, requests: Sequence[GroupRequest], done: _Done, *, adapter: Path | None, greedy: bool) -> None:
        if not self._process.is_ready:
            await self._process.start({})
        if self._count is not None:
            self._count.begin(time.monotonic())
        wanted = [[request.lease_id, index] for request in requests for index in request.indices]
        packed = [frames.pack_request(request) for request in requests]
        adapters = {} if adapter is None else {requests[0].policy_version: adapter}
        await self._process.send({"groups": packed, "rollouts": wanted, "greedy": greedy}, adapters)
        before_s = done.seconds
        for _ in wanted:
            answer = await self._process.receive()
            rollout = frames.unpack_rollout(answer["rollout"])
            done.rollouts[rollout.lease_id, rollout.index] = rollout
            done.seconds = before_s + answer["drawing_s"]
            if self._count is not None:
                self._count.done += 1

    def _count_later_turns(self, requests: Sequence[GroupRequest], count: WorkCount, *, greedy: bool) -> None:
        asked = {(one.policy_version, greedy, one.group_id, index) for one in requests for index in one.indices}
        count.total += len(asked & self._first_turns)
        self._first_turns |= asked

    def _wait_s(self, error: ChildExited | ChildLost, done: _Done, restarts: Restarts) -> float:
        """Return the seconds until the next attempt. Raises LearnerError if there were too many deaths or losses."""
        if isinstance(error, ChildExited):
            wait_s = restarts.died(random.random())
            extra = {"event": "evaluator_died", "data": {"deaths": restarts.deaths}}
            log.warning("the evaluator died (%d in a row): %s", restarts.deaths, error, extra=extra)
            if wait_s is None:
                raise LearnerError("The evaluator process keeps dying.", got=str(error))
            return wait_s
        is_away = isinstance(error, ClusterUnusable)
        if is_away and not self._is_patient:
            raise LearnerError("Evaluation is impossible because the Ray cluster is unavailable.", got=str(error))
        if not is_away:
            log.warning("the evaluator is lost: %s", error, extra={"event": "evaluator_died"})
            done.losses += 1
            if done.losses == LOSSES_IN_A_ROW:
                raise LearnerError(f"{done.losses} evaluator processes in a row were lost.", got=str(error))
        done.tries += 1
        return backoff_s(done.tries, random.random(), first_s=RESTART_S, limit_s=30.0)


def evaluator_of(
    learner: LearnerSettings,
    *,
    logs: Path,
    cluster: RayLink | None,
    is_patient: bool = True,
    count: WorkCount | None = None,
) -> Evaluator:
    """Return an evaluator that samples as the learner does, in one process.

    In a `cluster` the process uses its machine's device and threads.
    """
    changed: dict[str, object] = {"processes": 1, "hosts": 1, "address": ""}
    if cluster is not None:
        changed |= {"device": "auto", "threads": 0}
    settings = learner.model_copy(update={"learner": learner.learner.model_copy(update=changed)})
    process = process_of(program(settings), settings, logs=logs, cluster=cluster, kept=KEPT)
    return Evaluator(process, is_patient=is_patient, count=count)


@dataclass(slots=True, eq=False)
class _Done:
    """Rollouts that one call of `generate` has received so far, and counts of lost processes."""

    rollouts: dict[_Key, FinishedRollout] = field(default_factory=dict)
    seconds: float = 0.0
    losses: int = 0
    """Number of processes lost since the last new rollout, while the cluster answered."""
    tries: int = 0


def _without(requests: Sequence[GroupRequest], there: Collection[_Key]) -> list[GroupRequest]:
    missing = (
        replace(request, indices=tuple(index for index in request.indices if (request.lease_id, index) not in there))
        for request in requests
    )
    return [request for request in missing if request.indices]
