"""The real learner process on the built-in base model, killed as suddenly as in a power cut."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import SamplingConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.core.accounting.effects import PlannedGroup
from echo_hub.core.accounting.events import Event, LearnerLost, LearnerReady, RolloutArrived, StepComputed, StepDone
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.dashboard.source import Changes
from echo_hub.driving.event_queue import EventQueue
from echo_hub.evaluation.by_hub import Generated
from echo_hub.evaluation.due import DueVersions
from echo_hub.learner import frames
from echo_hub.learner.process import Learner, begun
from echo_hub.learner.settings import LearnerSettings, StepTold, TrainingGroup, TrainingRollout
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.training import trainer as trainer_module
from echo_hub.training.trainer import DEATHS_IN_A_ROW, LearnerState, Trainer
from echo_shared.errors import LearnerError
from echo_shared.files.full_disk import Room
from echo_shared.process.child import ChildExited
from echo_shared.process.supervised import SupervisedChild
from echo_shared.records.step_figures import TRAIN_S
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import FinishReason

BASE = resolve_base("builtin:tiny")
CODEC = PromptCodec.load(BASE)
PROMPTS = [CODEC.encode_prompt(text) for text in ("123+456=", "700+100=", "999+111=")]


def batch(step: int) -> list[TrainingGroup]:
    ids = CODEC.encode_prompt(str(570 + step))
    rollouts = tuple(
        TrainingRollout(
            completion_ids=ids,
            loss_mask=np.ones(len(ids), dtype=bool),
            behavior_logprobs=np.full(len(ids), -1.0, np.float32),
            reward=float(index),
            finish_reason=FinishReason.STOP,
            sampling_s=0.0,
        )
        for index in range(2)
    )
    return [TrainingGroup(prompt_ids=PROMPTS[0], rollouts=rollouts)]


def unrewarded(group: TrainingGroup) -> TrainingGroup:
    return replace(group, rollouts=tuple(replace(rollout, reward=nan) for rollout in group.rollouts))


def planned(step: int, rollouts: str = "") -> list[PlannedGroup]:
    """Return the batch of a step as it is planned: ids and rewards, without tokens."""
    return [PlannedGroup(step, (f"{step}-0{rollouts}",), (0.0, 1.0))]


def request(lease_id: int, policy_version: int) -> GroupRequest:
    return GroupRequest(
        lease_id=lease_id,
        group_id=lease_id,
        indices=(0, 1, 2),
        prompt_ids=PROMPTS[0],
        seed=lease_id,
        policy_version=policy_version,
        temperature=1.0,
        max_tokens=4,
        stop_ids=CODEC.stop_ids,
    )


def heldout(policy_version: int) -> list[GroupRequest]:
    """Return held-out problems: three for the base model, two dozen for any other version."""
    return [
        replace(request(n, policy_version), indices=(0,), prompt_ids=PROMPTS[n % 3])
        for n in range(24 if policy_version else 3)
    ]


def completions(generated: Generated) -> dict[int, list[int]]:
    return {rollout.lease_id: rollout.completion_ids.tolist() for rollout in generated.rollouts}


class OddSteps:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def export_path(self, step: int) -> Path | None:
        return self._run_dir / f"v{step}" if step % 2 else None

    def learning_rate(self, step: int) -> None: ...

    def objective(self, step: int) -> None: ...


class Reports(EventQueue):
    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub

    async def put(self, event: Event) -> None:
        await self._hub.report(event)


class Hub:
    """Stand-in for the hub: answers the trainer and collects its events."""

    def __init__(self, run_dir: Path, spawned: SupervisedChild | None = None, **learner: Any) -> None:
        config = HubConfig(
            sampling=SamplingConfig(max_tokens=4),
            training=TrainingConfig(steps=9, lora_rank=2),
            learner=LearnerConfig(threads=1, device="cpu", **learner),
        )
        self.run_dir = run_dir
        self.events: list[Event] = []
        self.loaded: list[set[int]] = []
        """For each read of the store: the ids of the groups."""
        self.at_batch: Callable[[], None] = lambda: None
        self.at_loss: Callable[[], None] = lambda: None
        self.at_computed: Callable[[int], None] = lambda step: None
        self._changes = Changes()
        self.trainer = Trainer(
            settings=LearnerSettings.of_run(config, base_dir=BASE, stop_ids=CODEC.stop_ids),
            run_dir=run_dir,
            batches=self,
            steps=OddSteps(run_dir),
            queue=Reports(self),
            due=DueVersions(config, RunDirectory(run_dir), done=()),
            pages=Changes(),
            room=Room(),
            spawned=spawned,
        )

    async def batch(self, step: int) -> Sequence[TrainingGroup]:
        self.at_batch()
        return batch(step)

    async def groups(self, wanted: Mapping[int, Sequence[str]]) -> Mapping[int, TrainingGroup]:
        """Return groups without rewards. Groups with an id above 99 were dropped meanwhile, so they are missing."""
        self.loaded.append(set(wanted))
        self._changes.notify()
        found = {group_id: batch(group_id)[0] for group_id in wanted if group_id < 100}
        return {group_id: unrewarded(group) for group_id, group in found.items()}

    async def report(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LearnerLost):
            self.at_loss()
        if isinstance(event, StepComputed):
            self.at_computed(event.step)
        self._changes.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await self._changes.wait(self._changes.number)

    def is_ready_again(self, version: int) -> bool:
        newest = self.events[-1]
        return isinstance(newest, LearnerReady) and newest.policy_version == version

    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, StepDone)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.trainer.run())
            yield
            running.cancel()


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_jobs_of_the_learner_and_its_death(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    trainer = hub.trainer
    assert (trainer.pid, trainer.state) == (None, LearnerState.STARTING)
    base = asyncio.ensure_future(trainer.generate(heldout(0), adapter=None, greedy=True))
    async with hub.running():
        async with asyncio.timeout(60):
            assert len((await base).rollouts) == 3
        assert hub.events == [LearnerReady(policy_version=0)]
        assert trainer.state is LearnerState.RUNNING
        trainer.train(1)
        trainer.sample(request(5, 1))
        trainer.sample(request(6, 1))
        await hub.until(lambda: len(hub.events) == 9)
        (done,) = [event for event in hub.events if isinstance(event, StepDone)]
        assert (done.step, done.metrics["updated"]) == (1, 1)
        assert done.metrics["eval_s"] > 0, "the base's evaluation"
        assert (hub.run_dir / "v1" / "adapter_model.safetensors").is_file()
        arrived = [event for event in hub.events if isinstance(event, RolloutArrived)]
        assert {event.rollout_id for event in arrived} == {f"{lease}-{index}" for lease in (5, 6) for index in range(3)}
        assert {(event.node_id, event.policy_version_start, event.policy_version_end) for event in arrived} == {
            (HUB_NODE_ID, 1, 1)
        }
        assert all(len(e.payload.completion_ids) == len(e.payload.behavior_logprobs) for e in arrived)

        first_pid = trainer.pid
        assert first_pid is not None

        def kill() -> None:
            if trainer.pid == first_pid:
                os.kill(first_pid, signal.SIGKILL)

        def give_one_too_late() -> None:
            """Request a step after the process has died, before the coordinator knows that."""
            assert (trainer.pid, trainer.state) == (first_pid, LearnerState.DOWN)
            trainer.train(2)

        hub.at_batch, hub.at_loss = kill, give_one_too_late
        trainer.train(2)
        trainer.sample(request(7, 1))
        await hub.until(lambda: hub.is_ready_again(1))
        told = {1: done.metrics}
        ready = LearnerReady(policy_version=1, metrics=told, screens={1: done.screen})
        assert hub.events[9:] == [LearnerLost(), ready], "metrics of step 1, as before"
        assert trainer.pid not in (None, first_pid)
        trainer.train(2)
        await hub.until(lambda: hub.steps() == [1, 2])
        assert len(hub.events) == 13, "the lost step waits until the coordinator requests it again"
        assert not (hub.run_dir / "v2").exists()
        assert trainer.state is LearnerState.RUNNING
    assert trainer.pid is None


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_a_dead_learner_process_is_replaced_by_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    async with begun(LearnerConfig(threads=1, device="cpu"), tmp_path) as spawned:
        assert spawned is not None
        os.kill(spawned.pid, signal.SIGKILL)
        hub = Hub(tmp_path, spawned)
        async with hub.running():
            await hub.until(lambda: len(hub.events) == 2)
            assert hub.events == [LearnerLost(), LearnerReady(policy_version=0)]
            assert hub.trainer.pid not in (None, spawned.pid)


async def handed_over(hub: Hub, *group_ids: int) -> None:
    for group_id in group_ids:
        hub.trainer.hand_over(group_id, (f"{group_id}-0",))
    await hub.until(lambda: set(group_ids) <= set().union(*hub.loaded))


async def test_groups_are_sent_before_their_step(tmp_path: Path) -> None:
    """Groups go to the learner as they arrive, so that a step needs only their rewards. The result must equal, byte for
    byte, that of steps whose groups are read from the store, even if a group has changed in between.
    """
    ahead, along = Hub(tmp_path / "ahead"), Hub(tmp_path / "along")
    told: list[list[int]] = []
    along.at_batch = lambda: told.append(along.steps())
    for hub in (ahead, along):
        hub.run_dir.mkdir()
        async with hub.running(), asyncio.timeout(60):
            await hub.until(lambda hub=hub: hub.events == [LearnerReady(policy_version=0)])
            if hub is ahead:
                await handed_over(hub, 0, 1, 3, 100)
                hub.trainer.hand_over(2, ("2-0",), unrewarded(batch(2)[0]))
            else:
                hub.trainer.begin(2, planned(2))
            for step in (1, 2, 3):
                if hub is ahead:
                    hub.trainer.begin(step, planned(step, "again" if step == 3 else ""))
                hub.trainer.train(step)
            await hub.until(lambda hub=hub: hub.steps() == [1, 2, 3])
    assert ahead.loaded == [{0, 1, 3, 100}, {3}] and along.loaded == [], "payloads in memory are not read"
    assert ahead.trainer._held == {}, "groups older than the previous batch were dropped"
    for step in (1, 3):
        one, other = (hub.run_dir / f"v{step}" / "adapter_model.safetensors" for hub in (ahead, along))
        assert one.read_bytes() == other.read_bytes()
    assert told[:2] == [[], []] and len(told) == 3
    events = [event for event in along.events if isinstance(event, StepComputed | StepDone)]
    for step in (1, 2, 3):
        computed, done = (event for event in events if event.step == step)
        assert isinstance(computed, StepComputed) and isinstance(done, StepDone)
        assert ("gap_s" in done.metrics) == (step > 1) and done.metrics.get("gap_s", 1.0) > 0


async def test_a_group_that_arrives_again_while_its_old_copy_is_dropped_is_held(hub: Hub) -> None:
    """Group 2 was sampled again. Its new copy arrives while a full pipe still delays the request to drop the old copy;
    the learner must use the new one.
    """
    large = np.zeros(2**20, np.int32)
    rollout = replace(batch(50)[0].rollouts[0], completion_ids=large, behavior_logprobs=np.zeros(2**20, np.float32))
    async with hub.running(), asyncio.timeout(60):
        await hub.until(lambda: hub.events == [LearnerReady(policy_version=0)])
        await handed_over(hub, 2, 5, 6)
        hub.trainer.begin(1, [PlannedGroup(5, ("5-0",), (0.0, 1.0))])
        hub.trainer.train(1)
        await hub.until(lambda: hub.steps() == [1])
        hub.trainer.hand_over(50, ("50-0",), replace(batch(50)[0], rollouts=(rollout,)))
        hub.trainer.hand_over(2, ("2-0again",), unrewarded(batch(2)[0]))
        hub.trainer.begin(2, [PlannedGroup(6, ("6-0",), (0.0, 1.0))])
        hub.trainer.train(2)
        hub.trainer.begin(3, planned(2, "again"))
        hub.trainer.train(3)
        await hub.until(lambda: hub.steps() == [1, 2, 3])
    assert LearnerLost() not in hub.events


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_a_computed_step_is_dropped_if_its_plan_is_not_stored(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may be computed before their plan is stored, and count as done once the plan is stored. If the learner
    process dies before that, the step counts as never begun. No other job may run in between.
    """
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    async with hub.running(), asyncio.timeout(120):
        await hub.until(lambda: hub.events == [LearnerReady(policy_version=0)])
        await handed_over(hub, 1, 2)
        hub.trainer.begin(1, planned(1))
        evaluation = asyncio.ensure_future(hub.trainer.generate(heldout(0), adapter=None, greedy=True))
        await hub.until(lambda: StepComputed(step=1) in hub.events)
        assert not (hub.run_dir / "v1").exists() and not list(hub.run_dir.glob("checkpoints/*"))
        assert not evaluation.done() and hub.trainer.pid is not None
        os.kill(hub.trainer.pid, signal.SIGKILL)
        await hub.until(lambda: hub.events[-2:] == [LearnerLost(), LearnerReady(policy_version=0)])
        assert len((await evaluation).rollouts) == 3
        hub.trainer.train(1)  # The plan is stored now.
        await hub.until(lambda: hub.steps() == [1])
        hub.trainer.begin(2, planned(2))
        await hub.until(lambda: StepComputed(step=2) in hub.events)
        hub.trainer.train(2)
        await hub.until(lambda: hub.steps() == [1, 2])
        assert hub.loaded == [{1, 2}, {2}]
        assert hub.events.count(StepComputed(step=2)) == 1, "a begun step is not trained again"

        second_pid = hub.trainer.pid
        assert second_pid is not None
        hub.at_computed = lambda step: os.kill(second_pid, signal.SIGKILL) if hub.trainer.pid == second_pid else None
        hub.trainer.train(3)
        await hub.until(lambda: hub.is_ready_again(2))
        assert hub.events[-3:-1] == [StepComputed(step=3), LearnerLost()], "the kill came before the end of the write"
        assert hub.steps() == [1, 2], "a computed step that is not written is not reported as done"
        hub.trainer.train(3)
        await hub.until(lambda: hub.steps() == [1, 2, 3])


class ToldFrames:
    """A learner process whose frames the test writes. A hub reads a real process's frames in this order only after a
    long pause."""

    pid = 0

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}
        """Number of the call that asked for each step."""
        self.asked_for_two = asyncio.Event()
        self._frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send(self, frame: Mapping[str, Any]) -> None:
        if "step" in frame:
            self.calls[frame["step"]] = frame["call"]
        if len(self.calls) == 2:
            self.asked_for_two.set()

    async def receive(self) -> dict[str, Any]:
        return await self._frames.get()

    def computed(self, step: int) -> None:
        self._frames.put_nowait({"call": self.calls[step], "kind": "item", "computed": step})

    def written(self, step: int) -> None:
        told = frames.pack_told({step: StepTold(metrics={TRAIN_S.key: 0.1}, screen={})})
        self._frames.put_nowait({"call": self.calls[step], "kind": "result", "policy_version": step, "told": told})


async def test_steps_are_reported_as_done_in_their_order(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause, the hub reads several answers together: step 2 is computed, and both steps are written."""
    child = ToldFrames()
    learner = Learner(child, {"policy_version": 0, "told": []}, None)  # type: ignore[arg-type]

    async def start(*_: Any, **__: Any) -> Learner:
        return learner

    async def stop() -> None:
        learner._reader.cancel()

    monkeypatch.setattr(Learner, "start", start)
    monkeypatch.setattr(learner, "stop", stop)
    async with hub.running(), asyncio.timeout(60):
        await hub.until(lambda: hub.events == [LearnerReady(policy_version=0)])
        hub.trainer.train(1)
        hub.trainer.train(2)
        await child.asked_for_two.wait()
        child.computed(1)
        await hub.until(lambda: StepComputed(step=1) in hub.events)
        child.computed(2)
        child.written(1)
        child.written(2)
        await hub.until(lambda: len(hub.steps()) == 2)
    assert hub.steps() == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_an_evaluation_keeps_its_version_regardless_of_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations keep their version while the learner trains a step, dies and loads another version. They are
    abandoned once their caller is gone.
    """
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    hub = Hub(tmp_path, micro_batch_tokens=64)
    trainer = hub.trainer
    async with hub.running(), asyncio.timeout(120):
        await hub.until(lambda: hub.events == [LearnerReady(policy_version=0)])
        trainer.train(1)
        await hub.until(lambda: hub.steps() == [1])
        adapter = tmp_path / "v1"
        with monkeypatch.context() as patch:
            said: list[bool] = []

            async def evaluate(learner: Learner, *args: Any, **named: Any) -> Generated:
                said.append(trainer.evaluates)
                return await drawn(learner, *args, **named)

            drawn = Learner.evaluate
            patch.setattr(Learner, "evaluate", evaluate)
            undisturbed = await trainer.generate(heldout(1), adapter=adapter, greedy=False)
        assert said and all(said) and not trainer.evaluates
        base = await trainer.generate(heldout(1), adapter=None, greedy=False)
        assert completions(base) != completions(undisturbed)

        at_work_on: list[int] = []
        first_pid = trainer.pid
        assert first_pid is not None

        def kill() -> None:
            at_work_on.append(len(evaluation.requests))
            if trainer.pid == first_pid:
                os.kill(first_pid, signal.SIGKILL)

        hub.at_batch = kill
        # A step that is due may start once parts of an evaluation have taken as long as the last step: with 0 s, after
        # at most one part.
        trainer._train_s = 0.0
        disturbed = asyncio.ensure_future(trainer.generate(heldout(1), adapter=adapter, greedy=False))
        await asyncio.sleep(0)
        (evaluation,) = trainer._jobs._queue  # type: ignore[attr-defined]
        trainer.train(2)
        await hub.until(lambda: hub.is_ready_again(1))
        trainer.train(2)
        await hub.until(lambda: hub.steps() == [1, 2])
        assert 0 < at_work_on[0] < len(heldout(1)), "the step ran in between"
        found = await disturbed
        assert completions(found) == completions(undisturbed)
        assert found.seconds > 0
        assert (await trainer.generate([], adapter=None, greedy=True)).rollouts == ()

        given_up = asyncio.ensure_future(trainer.generate(heldout(0), adapter=None, greedy=True))
        await asyncio.sleep(0)
        given_up.cancel()
        assert len((await trainer.generate(heldout(0), adapter=None, greedy=True)).rollouts) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_an_evaluation_outlives_a_death_that_another_task_notices_first(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies during an evaluation. The task that hands groups over notices it before the task that reads the
    process's answers."""

    async def receive(child: SupervisedChild, *, within_s: float = inf) -> dict[str, Any]:
        try:
            return await received(child, within_s=within_s)
        except ChildExited:
            await asyncio.sleep(2.0)
            raise

    received = SupervisedChild.receive
    monkeypatch.setattr(SupervisedChild, "receive", receive)
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    trainer = hub.trainer
    async with hub.running(), asyncio.timeout(120):
        await hub.until(lambda: hub.events == [LearnerReady(policy_version=0)])
        evaluation = asyncio.ensure_future(trainer.generate(heldout(0), adapter=None, greedy=True))
        while not trainer.evaluates:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)  # Until the pipe to the process is broken.
        trainer.hand_over(1, ("1-0",), unrewarded(batch(1)[0]))
        await hub.until(lambda: hub.events[1:] == [LearnerLost(), LearnerReady(policy_version=0)])
        async with asyncio.timeout(30):
            assert len((await evaluation).rollouts) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="what a broken Python does there is another thing")
async def test_a_learner_that_cannot_live_ends_the_run(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    monkeypatch.setenv("PYTHONHOME", str(hub.run_dir / "no-python-here"))
    with pytest.raises(LearnerError, match=r"(?s)dies again and again.*exit status 1.*learner\.log"):
        await hub.trainer.run()
    assert hub.events == [LearnerLost()] * (DEATHS_IN_A_ROW - 1)
    assert caplog.text.count("the learner died") == DEATHS_IN_A_ROW
    assert hub.trainer.state is LearnerState.DOWN
    assert "no-python-here" in (hub.run_dir / "logs" / "learner.log").read_text()
    assert hub.trainer.pid is None


async def test_a_learner_that_refuses_ends_the_run_at_once(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "learner.lock").mkdir()
    with pytest.raises(LearnerError, match=r"(?s)The learner failed.*learner\.lock"):
        await hub.trainer.run()
    assert hub.events == []
