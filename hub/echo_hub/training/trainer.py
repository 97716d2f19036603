"""Keeps the learner process alive and gives it its work: steps, evaluations and, in co-located mode, sampling.

Jobs are handed to the process in order. Groups are given to it as they come in, and a step's order then names them and
their rewards, so that little is on the way between a step's plan and its begin. A step is ordered while the one before
it is in training, and while its plan is being committed; the process keeps nothing of it until it is told that the plan
is in the store. A step is told of when it is computed and again when it is written; evaluations and sampling are waited
for. When the process dies it is started again from its newest checkpoint. What was lost with it: the coordinator asks
for its steps and its rollouts again, an evaluation goes on where it was.

An evaluation never holds up training for long: it is done in parts, with the adapter of its own version, and where a
step waits, it gives way after as much time as the last step took. So it takes half of the learner's time at most.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, assert_never

from echo_hub.core.effects import BatchGroup
from echo_hub.core.events import LearnerLost, LearnerReady, RolloutArrived, StepComputed, StepDone
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.step_screen import StepScreen
from echo_hub.dashboard.source import Changes
from echo_hub.evaluation.by_hub import Generated
from echo_hub.learner.process import Learner, StepUnderWay
from echo_hub.learner.request_batches import batches
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_shared.backoff import Restarts
from echo_shared.child import ChildExited
from echo_shared.errors import LearnerError
from echo_shared.messages import rollout_id
from echo_shared.rollout_books import RolloutPayload
from echo_shared.sampling import FinishedRollout, GroupRequest
from echo_shared.step_figures import HELD_BACK, TRAIN_S
from echo_shared.supervised import SupervisedChild

log = logging.getLogger(__name__)

DEATHS_IN_A_ROW: Final = 5
"""So many deaths without one finished job in between, and the learner is not started again: the run stops with its
error."""

HELD_AT_ONCE: Final = 16
"""Groups that are handed over before others have their turn."""

RESTART_S: Final = 1.0
"""Seconds before the first new start, or up to half less; doubled with every further death, up to half a minute."""


class LearnerState(StrEnum):
    """How the learner process is doing."""

    STARTING = "starting"
    """For the first time: it loads the base model, or waits for the learner's other hosts."""
    RUNNING = "running"
    DOWN = "down"
    """It has died, and is started again."""


LearnerEvent = LearnerReady | LearnerLost | StepComputed | StepDone | RolloutArrived
Report = Callable[[LearnerEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    step: int
    batch: Sequence[BatchGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Train:
    step: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Generate:
    """`requests` are those that are still to do, `finished` what is done of them."""

    requests: Sequence[GroupRequest]
    adapter: Path | None
    greedy: bool
    finished: list[FinishedRollout] = field(default_factory=list)
    seconds: float = 0.0
    done: asyncio.Future[Generated] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


_Job = _Begin | _Train | _Generate | GroupRequest


class Batches(Protocol):
    """Where batches come from; see `echo_hub.intake.episodes.TrainingBatches`."""

    async def batch(self, step: int) -> Sequence[TrainingGroup]: ...

    async def groups(self, wanted: Mapping[int, Sequence[str]]) -> Mapping[int, TrainingGroup]: ...


class Trainer:
    """The learner's keeper. `export_path`: where a step's adapter goes, if anywhere; `learning_rate` and `objective`
    (JSON): the step's, None: as the settings have them. All are asked once a step is planned, and answer the same
    whenever it is repeated. `disk`: called with what a full disk says while the learner waits for room on it, with
    nothing once it does not. `spawned`: the first process, if it was begun before."""

    def __init__(
        self,
        *,
        settings: LearnerSettings,
        run_dir: Path,
        batches: Batches,
        export_path: Callable[[int], Path | None],
        learning_rate: Callable[[int], float | None] = lambda step: None,
        objective: Callable[[int], str | None] = lambda step: None,
        disk: Callable[[str], object] = lambda said: None,
        spawned: SupervisedChild | None = None,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._batches = batches
        self._export_path = export_path
        self._learning_rate = learning_rate
        self._objective = objective
        self._disk = disk
        self._spawned = spawned
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._coming: dict[int, tuple[Sequence[str], TrainingGroup | None]] = {}
        """Groups that were handed over and are not on their way yet, with their rollouts."""
        self._held: dict[int, Sequence[str]] = {}
        """Those that the process holds."""
        self._loading = asyncio.Lock()
        """Held while groups are on their way: what is told of a group last is what the process holds."""
        self._newest_taken = -1
        """The newest group of the step that was begun last."""
        self._ordered = 0
        """The newest step that the process was given; at least its version."""
        self._planned = 0
        """The newest step of which it is known that its plan is in the store."""
        self._changes = Changes()
        """Of what comes, and of what is planned."""
        self._pid: int | None = None
        self.state = LearnerState.STARTING
        self._train_s = 0.0
        """Seconds of the last step."""

    @property
    def pid(self) -> int | None:
        """The learner process's id; None while there is none."""
        return self._pid

    def hand_over(self, group_id: int, rollout_ids: tuple[str, ...], at_hand: TrainingGroup | None = None) -> None:
        """Without the group `at_hand` it is read from the store."""
        self._coming[group_id] = rollout_ids, at_hand
        self._changes.notify()

    def begin(self, step: int, batch: Sequence[BatchGroup]) -> None:
        """`train` follows, once the plan is in the store."""
        self._jobs.put_nowait(_Begin(step=step, batch=batch))

    def train(self, step: int) -> None:
        self._planned = step
        self._changes.notify()
        self._jobs.put_nowait(_Train(step=step))

    async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
        """Draws all rollouts of `requests`, by the adapter in a directory or, None, by the base; beside training."""
        if not requests:
            return Generated(rollouts=(), seconds=0.0)
        job = _Generate(requests=requests, adapter=adapter, greedy=greedy)
        self._jobs.put_nowait(job)
        return await job.done

    def sample(self, request: GroupRequest) -> None:
        self._jobs.put_nowait(request)

    async def run(self, report: Report) -> None:
        """Works for ever. Raises LearnerError when the learner cannot be kept alive."""
        restarts = Restarts(most=DEATHS_IN_A_ROW, first_s=RESTART_S, limit_s=30.0, jitter=random.random)
        while True:
            learner: Learner | None = None
            try:
                if (hosts := self._settings.learner.hosts) > 1:
                    log.info("the learner waits at %s for %d other hosts", self._settings.learner.address, hosts - 1)
                spawned, self._spawned = self._spawned, None
                learner = await Learner.start(self._settings, self._run_dir, disk=self._disk, spawned=spawned)
                self._pid = learner.pid
                self._coming.clear()
                self._held.clear()
                self._ordered = learner.policy_version
                self.state = LearnerState.RUNNING
                self._drop_what_is_asked_for_again()
                resumed = learner.resumed
                await report(
                    LearnerReady(
                        policy_version=learner.policy_version,
                        metrics={step: told.metrics for step, told in resumed.items()},
                        screens={step: StepScreen.of(told.screen) for step, told in resumed.items()},
                    )
                )
                await self._work(learner, report, restarts)
            except ChildExited as error:
                wait_s = restarts.died()
                self.state = LearnerState.DOWN
                extra = {"event": "learner_died", "data": {"deaths": restarts.deaths}}
                log.warning("the learner died (%d in a row): %s", restarts.deaths, error, extra=extra)
                if wait_s is None:
                    what = f"The learner process dies again and again. {error.what}"
                    raise LearnerError(what, got=error.got, do=error.do) from error
                await report(LearnerLost())
                await asyncio.sleep(wait_s)
            finally:
                self._pid = None
                if learner is not None:
                    await learner.stop()

    async def _work(self, learner: Learner, report: Report, restarts: Restarts) -> None:
        """Hands jobs over, and tells of steps as they are done. Raises the first error of either."""
        try:
            async with asyncio.TaskGroup() as steps:
                steps.create_task(self._hand_over_all(learner))
                while True:
                    job = await self._jobs.get()
                    if isinstance(job, _Begin):
                        # A process that has come with an older version is given all from the store, in order.
                        if job.step == self._ordered + 1:
                            under_way = await self._begin(job, learner)
                            steps.create_task(self._tell_of(job.step, under_way, report, restarts))
                            await self._confirm(job.step, learner)
                    elif isinstance(job, _Train):
                        if job.step > self._ordered:
                            under_way = await self._order(job.step, learner)
                            steps.create_task(self._tell_of(job.step, under_way, report, restarts))
                    else:
                        await self._carry_out(job, learner, report)
                        restarts.succeeded()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _order(self, step: int, learner: Learner) -> StepUnderWay:
        """Hands over a step that was planned before this process, or this hub, was there."""
        self._ordered = step
        rate, objective = self._learning_rate(step), self._objective(step)
        batch = await self._batches.batch(step)
        return await learner.train(step, batch, self._export_path(step), learning_rate=rate, objective=objective)

    async def _begin(self, job: _Begin, learner: Learner) -> StepUnderWay:
        """Hands the step over, with those groups of its batch that the process does not hold yet."""
        self._ordered = job.step
        if self._lacking(job.batch):
            async with self._loading:
                await self._load(self._lacking(job.batch), learner)
        rewards = {group.group_id: group.rewards for group in job.batch}
        # A batch takes the oldest that are scored. Those older than the batch before it were dropped: all others have
        # had time to be scored.
        let_go = [held for held in self._held if held < self._newest_taken and held not in rewards]
        for group_id in (*rewards, *let_go):
            self._held.pop(group_id, None)
        self._newest_taken = max(rewards)
        return await learner.begin(
            job.step,
            rewards,
            self._export_path(job.step),
            let_go=let_go,
            learning_rate=self._learning_rate(job.step),
            objective=self._objective(job.step),
        )

    def _lacking(self, batch: Sequence[BatchGroup]) -> dict[int, Sequence[str]]:
        wanted = {group.group_id: group.rollout_ids for group in batch}
        return {group_id: ids for group_id, ids in wanted.items() if self._held.get(group_id) != ids}

    async def _confirm(self, step: int, learner: Learner) -> None:
        """Once the plan is in the store; no other job goes before."""
        while self._planned < step:
            await self._changes.wait(self._changes.number)
        await learner.confirm(step)

    async def _hand_over_all(self, learner: Learner) -> None:
        """Whatever comes, beside all jobs."""
        while True:
            while not self._coming:
                await self._changes.wait(self._changes.number)
            async with self._loading:
                await self._load({group_id: ids for group_id, (ids, _) in self._coming.items()}, learner)

    async def _load(self, wanted: Mapping[int, Sequence[str]], learner: Learner) -> None:
        """Has the process hold these groups, but for those that were dropped meanwhile."""
        groups: dict[int, TrainingGroup] = {}
        for group_id, rollout_ids in wanted.items():
            ids, at_hand = self._coming.pop(group_id, ((), None))
            if at_hand is not None and ids == rollout_ids:
                groups[group_id] = at_hand
        if lacking := {group_id: ids for group_id, ids in wanted.items() if group_id not in groups}:
            groups |= await self._batches.groups(lacking)
        held = list(groups)
        for start in range(0, len(held), HELD_AT_ONCE):
            some = held[start : start + HELD_AT_ONCE]
            # Noted before it waits for the pipe: a step that lets go of them meanwhile is told behind them.
            self._held.update({group_id: wanted[group_id] for group_id in some})
            await learner.hold({group_id: groups[group_id] for group_id in some})
            await asyncio.sleep(0)

    async def _tell_of(self, step: int, under_way: StepUnderWay, report: Report, restarts: Restarts) -> None:
        await under_way.computed()
        await report(StepComputed(step=step))
        told = await under_way.told()
        self._train_s = told.metrics[TRAIN_S.key]
        restarts.succeeded()
        screen = StepScreen.of(told.screen)
        if screen.suspects:
            log.warning(
                "step %d: %d rollouts are suspect, %d groups were left out, %d updates held back",
                *(step, len(screen.suspects), len(screen.left_out), told.metrics.get(HELD_BACK.key, 0)),
            )
        await report(StepDone(step=step, metrics=told.metrics, screen=screen))

    async def _carry_out(self, job: _Generate | GroupRequest, learner: Learner, report: Report) -> None:
        match job:
            case _Generate():
                await self._generate(learner, job)
            case GroupRequest():
                async for rollout in learner.sample(self._with_waiting(job)):
                    await report(arrived(rollout, node_id=HUB_NODE_ID))
            case _:
                assert_never(job)

    def _with_waiting(self, first: GroupRequest) -> list[GroupRequest]:
        """All groups that wait, so that they are drawn in one batch; other jobs keep their order behind them."""
        requests, others = [first], []
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if isinstance(job, GroupRequest):
                requests.append(job)
            else:
                others.append(job)
        for job in others:
            self._jobs.put_nowait(job)
        return requests

    async def _generate(self, learner: Learner, job: _Generate) -> None:
        """Draws part by part, until the job is done, nobody waits for it any more, or another job has waited long
        enough."""
        took_s = 0.0
        settings = self._settings.learner
        budget = settings.tokens_at_once * settings.processes * settings.hosts
        while job.requests and not job.done.done():
            part = job.requests[next(batches(job.requests, budget))]
            try:
                drawn = await learner.evaluate(part, adapter=job.adapter, greedy=job.greedy)
            except ChildExited:
                self._jobs.put_nowait(job)
                raise
            job.finished += drawn.rollouts
            job.seconds += drawn.seconds
            took_s += drawn.seconds  # Not what it waited for: the step before it may still be in training.
            job.requests = job.requests[len(part) :]
            if job.requests and not self._jobs.empty() and took_s >= self._train_s:
                self._jobs.put_nowait(job)
                return
        if not job.done.done():
            job.done.set_result(Generated(rollouts=job.finished, seconds=job.seconds))

    def _drop_what_is_asked_for_again(self) -> None:
        """At LearnerReady the coordinator repeats its step and its leases; only evaluations go on by themselves.

        Just before it, not at LearnerLost: the coordinator may give jobs until it has heard of the loss.
        """
        waiting = [self._jobs.get_nowait() for _ in range(self._jobs.qsize())]
        for job in waiting:
            if isinstance(job, _Generate):
                self._jobs.put_nowait(job)


def arrived(rollout: FinishedRollout, *, node_id: str) -> RolloutArrived:
    """What the coordinator is told of a rollout that was sampled on the hub itself."""
    return RolloutArrived(
        node_id=node_id,
        rollout_id=rollout_id(rollout.lease_id, rollout.index),
        lease_id=rollout.lease_id,
        group_id=rollout.group_id,
        index=rollout.index,
        policy_version_start=rollout.policy_version,
        policy_version_end=rollout.policy_version,
        payload=RolloutPayload.of(rollout),
    )
