"""The learner as its parent, the hub, uses it: a child process for steps, sampling and evaluations. Loads no torch.

Commands may overlap; the process executes them in sending order. A step's results are written in parallel to the next
command. Every await here may be cancelled: the process still finishes the command, and its answer is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import frames, unquantized
from echo_hub.learner.environment import environment
from echo_hub.learner.launch import Launch
from echo_hub.learner.settings import LearnerSettings, StepTold, TrainingGroup
from echo_shared.files.full_disk import Room
from echo_shared.process.child import ChildExited, Frame
from echo_shared.process.supervised import NO_HEARTBEAT, Command, SupervisedChild
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

WORKER: Final = "echo_hub.learner.serve"
LIMITS: Final = replace(NO_HEARTBEAT, silent_s=120.0, stalled_s=3_600.0)
"""Heartbeat limits of a ready process. One micro-batch or rollout takes minutes at most. A starting process has no
limit, because it may wait hours for other hosts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnEvaluation:
    """Rollouts of an evaluation, and the process's working time in seconds."""

    rollouts: list[FinishedRollout]
    seconds: float


class Learner:
    """The learner process; create it with `start`.

    Every command raises LearnerError (refused or failed) or ChildExited (the process has ended).
    """

    def __init__(self, child: SupervisedChild, opened: Frame, room: Room | None) -> None:
        self.policy_version: int = opened["policy_version"]
        """Policy version that the process holds, according to its last answer. Updated even after cancellation of the
        call that caused the answer."""
        self.resumed: Mapping[int, StepTold] = frames.unpack_told(opened["told"])
        """Results that the process found in its checkpoint, by step number: of the checkpoint's step and of the step
        before.
        """
        self._child = child
        self._room = room
        self._numbers = itertools.count(1)
        # The queues need no size limit: a call gets at most as many answers as it requested rollouts.
        self._answers: dict[int, asyncio.Queue[Frame | ChildExited]] = {}
        self._ended: ChildExited | None = None
        self._reader = asyncio.create_task(self._read(), name="learner-reader")

    @classmethod
    async def start(
        cls,
        settings: LearnerSettings,
        run_dir: Path,
        *,
        room: Room | None = None,
        spawned: SupervisedChild | None = None,
    ) -> Learner:
        """Start the process in `run_dir` with its newest checkpoint; its log is `run_dir`/logs/learner.log.

        `room` learns when the process waits for disk space. `spawned` is a process that `begun` has started earlier;
        None starts a new one.

        If learner.processes or learner.hosts is above 1, the process is the launcher of several processes
        (`echo_hub.learner.launch`), which start and end together. Then this method waits for the other hosts.
        """
        child = spawned or await _spawn(settings.learner, run_dir)
        given = {"settings": settings.model_dump(mode="json"), "run_dir": str(run_dir), "beat_s": LIMITS.beat_s}
        await child.open({"call": 0, "command": "open", **given})
        if child.ready["kind"] == "error":
            await child.stop()
            raise frames.unpack_error(child.ready)
        return cls(child, child.ready, room)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def hold(self, groups: Mapping[int, TrainingGroup]) -> None:
        """Send groups of later steps to the process, by group id. The process keeps each group until a step trains on
        it or discards it.

        NaN stands for a reward that is not known yet.
        """
        await self._tell("hold", groups={group_id: frames.pack_group(group) for group_id, group in groups.items()})

    async def train(
        self,
        step: int,
        groups: Sequence[TrainingGroup],
        export_to: Path | None,
        *,
        learning_rate: float | None = None,
        objective: str | None = None,
    ) -> StepUnderWay:
        """Send the step that turns policy version `step` - 1 into `step`.

        The process may still hold an older version, because it executes earlier commands first. `learning_rate` and
        `objective` (JSON) override the settings for this step; None keeps them.
        """
        fields = {
            "groups": frames.pack_groups(groups),
            "export_to": None if export_to is None else str(export_to),
            "learning_rate": learning_rate,
            "objective": objective,
        }
        return StepUnderWay(await self._call("train", step=step, **fields))

    async def begin(
        self,
        step: int,
        rewards: Mapping[int, Sequence[float]],
        export_to: Path | None,
        *,
        let_go: Collection[int] = (),
        learning_rate: float | None = None,
        objective: str | None = None,
    ) -> StepUnderWay:
        """Send a step before its batch is in the hub's database. The process computes the step, but writes and reports
        it only after `confirm`.

        Until `confirm`, only `hold` may be sent. The step trains on groups sent by `hold`, in the order of `rewards`,
        which lists the rewards of each group's rollouts. `let_go` names groups sent by `hold` that no step will use.
        """
        fields = {
            "rewards": [[group_id, list(of_group)] for group_id, of_group in rewards.items()],
            "export_to": None if export_to is None else str(export_to),
            "let_go": list(let_go),
            "learning_rate": learning_rate,
            "objective": objective,
        }
        return StepUnderWay(await self._call("begin", step=step, **fields))

    async def confirm(self, step: int) -> None:
        """Allow the process to write and report the step that `begin` started: its batch is in the hub's
        database now.
        """
        await self._tell("confirm", step=step)

    async def sample(self, groups: Sequence[GroupRequest]) -> AsyncGenerator[FinishedRollout, None]:
        """Draw all rollouts of `groups`, which must request `policy_version`. Yield each one when it is finished."""
        requests = [frames.pack_request(group) for group in groups]
        async with contextlib.aclosing(await self._call("sample", groups=requests)) as answers:
            async for frame in answers:
                if frame["kind"] == "item":
                    yield frames.unpack_rollout(frame["rollout"])

    async def evaluate(self, groups: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> DrawnEvaluation:
        """Draw all rollouts of `groups` with the PEFT `adapter` in a directory; None means the base model.

        Independent of the version that the process holds. Draws are greedy, or use the requests' seeds.
        """
        fields = {
            "groups": [frames.pack_request(group) for group in groups],
            "adapter": None if adapter is None else str(adapter),
            "greedy": greedy,
        }
        async with contextlib.aclosing(await self._call("evaluate", **fields)) as answers:
            *items, result = [frame async for frame in answers]
        return DrawnEvaluation(
            rollouts=[frames.unpack_rollout(item["rollout"]) for item in items], seconds=result["at_work_s"]
        )

    async def stop(self) -> None:
        """End the process. A short step is finished first. Does nothing if the process has ended."""
        await self._child.stop()
        await self._reader

    async def _tell(self, command: str, **fields: Any) -> None:
        if self._ended is not None:
            raise self._ended
        await self._child.send({"call": next(self._numbers), "command": command, **fields})

    async def _call(self, command: str, **fields: Any) -> AsyncGenerator[Frame, None]:
        if self._ended is not None:
            raise self._ended
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        try:
            await self._child.send({"call": number, "command": command, **fields})
        except BaseException:
            del self._answers[number]
            raise
        return self._answers_to(number)

    async def _answers_to(self, number: int) -> AsyncGenerator[Frame, None]:
        try:
            kind = "item"
            while kind == "item":
                frame = await self._answers[number].get()
                if isinstance(frame, ChildExited):
                    raise frame
                kind = frame["kind"]
                if kind == "error":
                    raise frames.unpack_error(frame)
                yield frame
        finally:
            del self._answers[number]

    async def _read(self) -> None:
        """Read the child's frames until it ends. No other task reads them."""
        try:
            while True:
                frame = await self._child.receive()
                if frame["kind"] == "disk":
                    self._waits_for_space(frame["full"])
                self.policy_version = frame.get("policy_version", self.policy_version)
                answers = self._answers.get(frame["call"])
                if answers is not None:
                    answers.put_nowait(frame)
        except ChildExited as error:
            self._ended = error
            for answers in self._answers.values():
                answers.put_nowait(error)
            self._waits_for_space("")

    def _waits_for_space(self, said: str) -> None:
        if self._room is not None:
            self._room.elsewhere("the learner", said)


class StepUnderWay:
    def __init__(self, answers: AsyncGenerator[Frame, None]) -> None:
        self._answers = answers

    async def computed(self) -> None:
        """Wait until the step is computed and the process is free for the next command. A crash may still lose the
        step.
        """
        await anext(self._answers)

    async def metrics(self) -> Mapping[str, float]:
        """Wait like `told`, and return only the metrics."""
        return (await self.told()).metrics

    async def told(self) -> StepTold:
        """Wait until the step's checkpoint (if due) and adapter (if requested) are written, and return its results."""
        async with contextlib.aclosing(self._answers) as answers:
            async for frame in answers:
                result = frame
        (told,) = frames.unpack_told(result["told"]).values()
        return told


@contextlib.asynccontextmanager
async def begun(
    settings: LearnerConfig, run_dir: Path, *, trains: bool = True
) -> AsyncIterator[SupervisedChild | None]:
    """Start a learner process early: it loads its libraries, which takes seconds, while the hub loads its own.

    Pass the process to `Learner.start`. The process is killed when the `async with` block ends. Yields None if the
    system cannot start a process; `Learner.start` then reports the error. Yields None, too, if the run does not train
    (`trains`).
    """
    child: SupervisedChild | None = None
    if trains:
        with contextlib.suppress(ChildExited):
            child = await _spawn(settings, run_dir)
    try:
        yield child
    finally:
        if child is not None:
            child.kill()
            await child.stop()


async def _spawn(settings: LearnerConfig, run_dir: Path) -> SupervisedChild:
    """Start the learner process, or the launcher of several learner processes. Raises ChildExited."""
    module, *arguments = _command(settings)
    log = run_dir / "logs" / "learner.log"
    env = {**environment(settings), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = Command(module=module, arguments=tuple(arguments), name="learner", log=log, env=env)
    return await SupervisedChild.spawn(command, LIMITS)


def _command(learner: LearnerConfig) -> Sequence[str]:
    if learner.processes * learner.hosts == 1:
        return (WORKER,) if learner.base_bits else unquantized.command(WORKER)
    launch = Launch(processes=learner.processes, hosts=learner.hosts, address=learner.address, parent_pid=os.getpid())
    return ("echo_hub.learner.launch", launch.model_dump_json())
