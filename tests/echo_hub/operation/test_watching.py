from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from echo_hub.operation import watching as watching_module
from echo_hub.operation.problems import Change, ProblemKind, RunObservation, RunProblems
from echo_hub.operation.watching import Watching, free_bytes
from echo_shared.errors import StorageError
from echo_shared.records.run import StepRecord


class Run:
    """A stand-in for a run: its states are scripted, and it records the alerts about them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen = RunObservation()
        self.rewards: list[float] = []
        self.told: list[Change] = []
        self.num_looks = 0
        self.num_notified = 0
        self.fails = False
        self.looked = asyncio.Event()
        self.watching = Watching(
            RunProblems(learner_idle_s=600.0, disk_free_bytes=2_000_000_000),
            run=self,
            told=self,
        )

    def changed(self, change: Change) -> None:
        self.told.append(change)

    def notify(self) -> None:
        self.num_notified += 1

    async def observe(self) -> RunObservation:
        self.num_looks += 1
        self.looked.set()
        return self.seen

    async def steps(self, since: int) -> Sequence[StepRecord]:
        """Return at most three steps, as a store limits long answers."""
        if self.fails:
            raise StorageError("The hub's database cannot be read.")
        return [
            StepRecord(
                step=step + 1,
                planned_at=1.0,
                trained_at=2.0,
                num_groups=1,
                num_rollouts=1,
                num_tokens=1,
                mean_reward=reward,
                staleness_mean=0.0,
                staleness_max=0,
                figures={},
            )
            for step, reward in list(enumerate(self.rewards))[since : since + 3]
        ]


async def test_problems_are_logged_and_told_at_begin_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = Run()
    run.seen = RunObservation(disk_free_bytes=1_000_000_000)
    await run.watching.look(run.now)
    await run.watching.look(run.now)
    assert [problem.kind for problem in run.watching.active] == [ProblemKind.DISK] and run.num_notified == 1
    run.seen, run.now = RunObservation(), 1_000.0
    await run.watching.look(run.now)
    assert run.watching.active == () and [change.began for change in run.told] == [True, False]
    began, over = caplog.records
    assert (began.levelno, began.event, began.subject) == (logging.WARNING, "problem_began", "disk")  # type: ignore[attr-defined]
    assert (over.levelno, over.event) == (logging.INFO, "problem_ended")  # type: ignore[attr-defined]
    assert over.getMessage() == f"over: {began.getMessage()}"


async def test_each_step_is_counted_once_and_all_of_those_before_a_restart() -> None:
    run = Run()
    run.rewards = [0.01 * step for step in range(80)]
    await run.watching.look(run.now)
    run.rewards += [0.0] * 20
    await run.watching.look(run.now)
    await run.watching.look(run.now)
    assert [change.problem.kind for change in run.told] == [ProblemKind.REWARD_FELL]


async def test_watching_continues_when_the_store_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_module, "LOOK_S", 0.0)
    run = Run()
    run.fails, run.rewards = True, [1.0] * 5
    run.seen = RunObservation(broken={ProblemKind.DATABASE_AWAY: "It is away."})
    task = asyncio.create_task(run.watching.run())
    async with asyncio.timeout(60):
        while run.num_looks < 3:
            run.looked.clear()
            await run.looked.wait()
    assert [problem.kind for problem in run.watching.active] == [ProblemKind.DATABASE_AWAY]
    assert run.watching._problems.rewards.step == 0
    run.fails = False
    await run.watching.look(run.now)
    assert run.watching._problems.rewards.step == 5, "they are read the next time"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def test_a_disk_has_room(tmp_path: Path) -> None:
    assert (free_bytes(tmp_path) or 0) > 0 and free_bytes(tmp_path / "none") is None
