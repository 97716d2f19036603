"""Keep the learner process running, and send it steps, evaluations and, in co-located mode, requests to sample.

The process gets jobs in order. Each complete group is sent immediately, so a step's job contains only group ids and
rewards. A step's job is sent while the learner still trains the previous step and the driver commits the plan of the
new step. The process does not write a step's results until the hub confirms that the database holds the plan. The
process answers twice for each step: after computing it, and after writing its results to disk. If the process dies, it
is started again from its newest checkpoint. Then the coordinator requests lost steps and rollouts again; the trainer
itself resumes an evaluation.

Evaluations run in parts, each with the adapter of its own version. If a step waits, the evaluation pauses as soon as it
has taken as much time as the last step. So evaluations take at most half of the learner's time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, assert_never

from echo_hub.core.accounting.effects import PlannedGroup
from echo_hub.core.accounting.events import (
    LearnerLost,
    LearnerReady,
    RolloutArrived,
    StepComputed,
    StepDone,
)
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.trust.screening import StepScreen
from echo_hub.dashboard.source import Changes
from echo_hub.driving.event_queue import EventQueue
from echo_hub.evaluation.by_hub import Generated
from echo_hub.evaluation.due import DueVersions
from echo_hub.intake.episodes import TrainingBatches
from echo_hub.learner.process import Learner, StepUnderWay
from echo_hub.learner.request_batches import batches
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.scoring.stop_strings import NO_STRINGS, StopStrings
from echo_hub.training.step_settings import RunStepSettings
from echo_shared.errors import LearnerError
from echo_shared.files.full_disk import Room
from echo_shared.process.backoff import Restarts
from echo_shared.process.child import ChildExited
from echo_shared.process.supervised import SupervisedChild
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.step_figures import HELD_BACK, TRAIN_S
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import rollout_id

log = logging.getLogger(__name__)

DEATHS_IN_A_ROW: Final = 5
"""If the process dies this many times in a row without finishing a job, the run stops with the learner's error."""

HELD_AT_ONCE: Final = 16
"""Number of groups sent to the process before other tasks of the event loop may run."""

RESTART_S: Final = 1.0
"""Wait in seconds before the first restart; random jitter shortens it by up to half. The wait doubles with every
further death, up to 30 s."""


class LearnerState(StrEnum):
    STARTING = "starting"
    """The first process is loading the base model, or waiting for the learner's other hosts."""
    RUNNING = "running"
    DOWN = "down"
    """The process has died and will be started again."""


LearnerEvent = LearnerReady | LearnerLost | StepComputed | StepDone | RolloutArrived


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    step: int
    batch: Sequence[PlannedGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Train:
    step: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Generate:
    """An evaluation. `requests` are still to be drawn; `finished` holds the rollouts drawn so far."""

    requests: Sequence[GroupRequest]
    adapter: Path | None
    greedy: bool
    finished: list[FinishedRollout] = field(default_factory=list)
    seconds: float = 0.0
    done: asyncio.Future[Generated] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


_Job = _Begin | _Train | _Generate | GroupRequest


class Trainer:
    """Supervises the learner process and sends it its jobs."""

    def __init__(
        self,
        *,
        settings: LearnerSettings,
        run_dir: Path,
        batches: TrainingBatches,
        steps: RunStepSettings,
        queue: EventQueue,
        due: DueVersions,
        pages: Changes,
        room: Room,
        stop_strings: StopStrings = NO_STRINGS,
        spawned: SupervisedChild | None = None,
    ) -> None:
        """`queue` receives the learner's events. `due` is told which versions can be evaluated. `pages` is notified of
        events. `room` is told while the process waits for disk space. `spawned` is the first process, if it is already
        running."""
        self._settings = settings
        self._run_dir = run_dir
        self._batches = batches
        self._steps = steps
        self._queue = queue
        self._due = due
        self._pages = pages
        self._room = room
        self._stop_strings = stop_strings
        self._spawned = spawned
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._coming: dict[int, tuple[Sequence[str], TrainingGroup | None]] = {}
        """Complete groups that are not sent yet: rollout ids, and contents that are still in memory."""
        self._held: dict[int, Sequence[str]] = {}
        """Groups that the learner process holds, by id, with the ids of their rollouts."""
        self._loading = asyncio.Lock()
        """Lock, held while groups are read from the database and sent. So sends do not overlap: if a group is sent
        twice, the process keeps the content that was sent last."""
        self._newest_taken = -1
        """Highest group id in the batch of the step that was begun last."""
        self._ordered = 0
        """Newest step that the process was told to compute. Never lower than the version that the process holds."""
        self._planned = 0
        """Newest step whose plan is in the database."""
        self._changes = Changes()
        """Wakes the task that sends jobs to the process: notified when a group is complete or a step is planned."""
        self._pid: int | None = None
        self.state = LearnerState.STARTING
        self._train_s = 0.0
        """Duration of the last training step, in seconds."""
        self.evaluates = False
        """True while the learner draws an evaluation."""

    @property
    def pid(self) -> int | None:
        return self._pid

    def hand_over(self, group_id: int, rollout_ids: tuple[str, ...], at_hand: TrainingGroup | None = None) -> None:
        """Send a complete group to the process. `at_hand` is its content; None means that the content is read from the
        database."""
        self._coming[group_id] = rollout_ids, at_hand
        self._changes.notify()

    def begin(self, step: int, batch: Sequence[PlannedGroup]) -> None:
        """Let the process compute a step before its plan is committed. Call `train` when the database holds the
        plan."""
        self._jobs.put_nowait(_Begin(step=step, batch=batch))

    def train(self, step: int) -> None:
        """Let the process train a step and write its results, because the database now holds the step's plan. If
        `begin` has already let it compute the step, the process only writes."""
        self._planned = step
        self._changes.notify()
        self._jobs.put_nowait(_Train(step=step))

    async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
        """Return all rollouts of `requests`, drawn between steps. `adapter` is the adapter's directory; None means the
        bare base model."""
        if not requests:
            return Generated(rollouts=(), seconds=0.0)
        job = _Generate(requests=requests, adapter=adapter, greedy=greedy)
        self._jobs.put_nowait(job)
        return await job.done

    def sample(self, request: GroupRequest) -> None:
        """Queue a request in co-located mode. Its rollouts are put into the event queue."""
        self._jobs.put_nowait(request)

    async def run(self) -> None:
        """Supervise the process until cancelled. Raises LearnerError after DEATHS_IN_A_ROW deaths without a finished
        job."""
        restarts = Restarts(most=DEATHS_IN_A_ROW, first_s=RESTART_S, limit_s=30.0)
        while True:
            learner: Learner | None = None
            try:
                if (hosts := self._settings.learner.hosts) > 1:
                    log.info("the learner waits at %s for %d other hosts", self._settings.learner.address, hosts - 1)
                spawned, self._spawned = self._spawned, None
                learner = await Learner.start(self._settings, self._run_dir, room=self._room, spawned=spawned)
                self._pid = learner.pid
                self._coming.clear()
                self._held.clear()
                self._ordered = learner.policy_version
                self.state = LearnerState.RUNNING
                self._drop_what_is_asked_for_again()
                resumed = learner.resumed
                await self._report(
                    LearnerReady(
                        policy_version=learner.policy_version,
                        metrics={step: told.metrics for step, told in resumed.items()},
                        screens={step: StepScreen.of(told.screen) for step, told in resumed.items()},
                    )
                )
                await self._work(learner, restarts)
            except ChildExited as error:
                wait_s = restarts.died(random.random())
                self.state = LearnerState.DOWN
                extra = {"event": "learner_died", "data": {"deaths": restarts.deaths}}
                log.warning("the learner died (%d in a row): %s", restarts.deaths, error, extra=extra)
                if wait_s is None:
                    what = f"The learner process dies again and again. {error.what}"
                    raise LearnerError(what, got=error.got, do=error.do) from error
                await self._report(LearnerLost())
                await asyncio.sleep(wait_s)
            finally:
                self._pid = None
                if learner is not None:
                    await learner.stop()

    async def _report(self, event: LearnerEvent) -> None:
        """Put an event into the queue. If the learner holds or has trained a new version, that version becomes due for
        evaluation."""
        await self._queue.put(event)
        self._pages.notify()
        if isinstance(event, LearnerReady):
            self._due.reached(event.policy_version)
        elif isinstance(event, StepDone):
            self._due.reached(event.step)

    async def _work(self, learner: Learner, restarts: Restarts) -> None:
        """Carry out jobs of the learner process, and report finished steps. Raises the first error of a job or a
        report.
        """
        try:
            async with asyncio.TaskGroup() as steps:
                steps.create_task(self._hand_over_all(learner))
                newest: asyncio.Task[None] | None = None
                while True:
                    job = await self._jobs.get()
                    if isinstance(job, _Begin):
                        # After a restart the process may have an older version. Then `_Train` jobs repeat the steps
                        # that it lacks, read from the database.
                        if job.step == self._ordered + 1:
                            under_way = await self._begin(job, learner)
                            newest = steps.create_task(self._tell_of(job.step, under_way, restarts, newest))
                            await self._confirm(job.step, learner)
                    elif isinstance(job, _Train):
                        if job.step > self._ordered:
                            under_way = await self._order(job.step, learner)
                            newest = steps.create_task(self._tell_of(job.step, under_way, restarts, newest))
                    else:
                        await self._carry_out(job, learner)
                        restarts.succeeded()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _order(self, step: int, learner: Learner) -> StepUnderWay:
        """Send a step whose plan was made before this process or this hub started. Its batch is read from the
        database."""
        self._ordered = step
        rate, objective = self._steps.learning_rate(step), self._steps.objective(step)
        batch = await self._batches.batch(step)
        return await learner.train(step, batch, self._steps.export_path(step), learning_rate=rate, objective=objective)

    async def _begin(self, job: _Begin, learner: Learner) -> StepUnderWay:
        """Send a step. If the process lacks groups of its batch, send these first."""
        self._ordered = job.step
        if self._lacking(job.batch):
            async with self._loading:
                await self._load(self._lacking(job.batch), learner)
        rewards = {group.group_id: group.rewards for group in job.batch}
        # The process may discard groups that are older than the previous batch and still untrained. A batch takes the
        # oldest scored groups, so the hub has dropped these.
        let_go = [held for held in self._held if held < self._newest_taken and held not in rewards]
        for group_id in (*rewards, *let_go):
            self._held.pop(group_id, None)
        self._newest_taken = max(rewards)
        return await learner.begin(
            job.step,
            rewards,
            self._steps.export_path(job.step),
            let_go=let_go,
            learning_rate=self._steps.learning_rate(job.step),
            objective=self._steps.objective(job.step),
        )

    def _lacking(self, batch: Sequence[PlannedGroup]) -> dict[int, Sequence[str]]:
        wanted = {group.group_id: group.rollout_ids for group in batch}
        return {group_id: ids for group_id, ids in wanted.items() if self._held.get(group_id) != ids}

    async def _confirm(self, step: int, learner: Learner) -> None:
        """Confirm the step when the database holds its plan. No other job is sent in the meantime."""
        while self._planned < step:
            await self._changes.wait(self._changes.number)
        await learner.confirm(step)

    async def _hand_over_all(self, learner: Learner) -> None:
        while True:
            while not self._coming:
                await self._changes.wait(self._changes.number)
            async with self._loading:
                await self._load({group_id: ids for group_id, (ids, _) in self._coming.items()}, learner)

    async def _load(self, wanted: Mapping[int, Sequence[str]], learner: Learner) -> None:
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
            # Record the groups before the await. If a step begins in the meantime and discards some of them, its
            # message comes after the groups' message in the pipe.
            self._held.update({group_id: wanted[group_id] for group_id in some})
            await learner.hold({group_id: groups[group_id] for group_id in some})
            await asyncio.sleep(0)

    async def _tell_of(
        self, step: int, under_way: StepUnderWay, restarts: Restarts, before: asyncio.Task[None] | None
    ) -> None:
        """Report the step when its computation ends, and again when its checkpoint is written.

        `before` is the task that reports the previous step. If the hub reads the answers of both steps at once, the
        later step could be reported first. So this function waits for `before` ahead of its second report.
        """
        await under_way.computed()
        await self._report(StepComputed(step=step))
        told = await under_way.told()
        self._train_s = told.metrics[TRAIN_S.key]
        restarts.succeeded()
        screen = StepScreen.of(told.screen)
        if screen.suspects:
            log.warning(
                "step %d: %d rollouts are suspect, %d groups were left out, %d updates held back",
                *(step, len(screen.suspects), len(screen.left_out), told.metrics.get(HELD_BACK.key, 0)),
            )
        if before is not None:
            await asyncio.wait([before])
        await self._report(StepDone(step=step, metrics=told.metrics, screen=screen))

    async def _carry_out(self, job: _Generate | GroupRequest, learner: Learner) -> None:
        match job:
            case _Generate():
                await self._generate(learner, job)
            case GroupRequest():
                async for rollout in learner.sample(self._with_waiting(job)):
                    await self._report(self._stop_strings.arrived(arrived(rollout, node_id=HUB_NODE_ID)))
            case _:
                assert_never(job)

    def _with_waiting(self, first: GroupRequest) -> list[GroupRequest]:
        """Return `first` together with all waiting requests to sample, so that one batch draws them. Other waiting jobs
        keep their order.
        """
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
        """Draw an evaluation part by part until it is done or cancelled. If another job waits, pause as soon as the
        parts took as long as the last step."""
        took_s = 0.0
        settings = self._settings.learner
        budget = settings.tokens_at_once * settings.processes * settings.hosts
        while job.requests and not job.done.done():
            part = job.requests[next(batches(job.requests, budget))]
            self.evaluates = True
            try:
                drawn = await learner.evaluate(part, adapter=job.adapter, greedy=job.greedy)
            except (ChildExited, asyncio.CancelledError):
                # If another task notices the death of the process first, this task is cancelled.
                self._jobs.put_nowait(job)
                raise
            finally:
                self.evaluates = False
            job.finished += drawn.rollouts
            job.seconds += drawn.seconds
            took_s += drawn.seconds  # The process's working time, without its wait for an unfinished step.
            job.requests = job.requests[len(part) :]
            if job.requests and not self._jobs.empty() and took_s >= self._train_s:
                self._jobs.put_nowait(job)
                return
        if not job.done.done():
            job.done.set_result(Generated(rollouts=job.finished, seconds=job.seconds))

    def _drop_what_is_asked_for_again(self) -> None:
        """Drop all jobs except evaluations. At LearnerReady, the coordinator sends its steps and leases again.

        Call this method just before reporting LearnerReady. At LearnerLost it would be too early, because the
        coordinator sends jobs until it handles that event.
        """
        waiting = [self._jobs.get_nowait() for _ in range(self._jobs.qsize())]
        for job in waiting:
            if isinstance(job, _Generate):
                self._jobs.put_nowait(job)


def arrived(rollout: FinishedRollout, *, node_id: str) -> RolloutArrived:
    """Return the event for a rollout that the hub's own learner has sampled."""
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
