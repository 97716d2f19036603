from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.evaluation.due import DueVersions, is_due
from echo_hub.evaluation.measuring import Evaluations
from echo_hub.run.directory import RunDirectory
from echo_shared.records.run import Evaluation, EvaluationKind


class Run:
    def __init__(self, root: Path, *, every: int = 3) -> None:
        self.config = HubConfig(training=TrainingConfig(steps=10), evaluation=EvaluationConfig(every=every))
        self.directory = RunDirectory(root)
        self.recorded: list[int] = []
        self.may_measure = asyncio.Event()
        self.may_measure.set()
        self.news = asyncio.Event()

    def export(self, *versions: int) -> None:
        for version in versions:
            self.directory.adapter(version).mkdir(parents=True)

    def due(self, *, first_version: int = 0) -> DueVersions:
        """Return the queue of due evaluations as a restarted hub builds it from the recorded evaluations."""
        return DueVersions(self.config, self.directory, done=set(self.recorded), first_version=first_version)

    def evaluations(self, due: DueVersions) -> Evaluations:
        return Evaluations(due, measuring=self, books=self)

    async def measure(self, policy_version: int) -> list[Evaluation]:
        await self.may_measure.wait()
        return [
            Evaluation(
                policy_version=policy_version,
                kind=EvaluationKind.GREEDY,
                num_problems=1,
                samples=1,
                num_unscored=0,
                accuracy=1.0,
                accuracy_error=0.0,
                pass_at={},
                mean_reward=1.0,
                mean_tokens=3.0,
                share_truncated=0.0,
                seconds=0.5,
                evaluated_at=1.0,
            )
        ]

    async def record(self, measured: Sequence[Evaluation]) -> None:
        self.recorded.append(measured[0].policy_version)
        self.news.set()

    async def until(self, *recorded: int) -> None:
        async with asyncio.timeout(60):
            while self.recorded != list(recorded):
                self.news.clear()
                await self.news.wait()


async def test_due_versions_are_evaluated_once_and_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    due = run.due()
    evaluations = run.evaluations(due)
    assert [version for version in range(11) if is_due(run.config, version)] == [0, 3, 6, 9, 10]
    assert [version for version in range(11) if is_due(Run(tmp_path, every=0).config, version)] == [0, 10]
    working = asyncio.create_task(evaluations.run())
    due.reached(0)
    await run.until(0)
    run.may_measure.clear()
    run.export(2, 3, 6, 9)
    for step in (2, 3, 6, 6):
        due.reached(step)
    assert due.waiting == {3, 6}, "version 9 is on the disk, from before the learner died, and not reached yet"
    run.may_measure.set()
    await run.until(0, 3, 6)
    due.reached(6)
    due.reached(9)
    await run.until(0, 3, 6, 9)
    assert not due.waiting
    working.cancel()
    await asyncio.wait([working])


async def test_an_interrupted_evaluation_is_repeated_after_the_restart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.export(3, 6)
    first = run.due()
    working = asyncio.create_task(run.evaluations(first).run())
    first.reached(3)
    await run.until(0, 3)
    run.may_measure.clear()
    first.reached(6)
    await asyncio.sleep(0)
    working.cancel()
    await asyncio.wait([working])
    assert run.recorded == [0, 3]
    run.may_measure.set()
    second = run.due()
    working = asyncio.create_task(run.evaluations(second).run())
    second.reached(7)
    await run.until(0, 3, 6)
    assert not second.waiting
    working.cancel()
    await asyncio.wait([working])


async def test_a_requested_version_is_evaluated_once_even_if_not_due(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.export(1, 2)
    due = run.due()
    evaluations = run.evaluations(due)
    working = asyncio.create_task(evaluations.run())
    assert due.want(None, action=1) == due.want(2, action=2) == ""
    await run.until(2)
    assert due.take_actions(2) == {1, 2} and not due.take_actions(2)
    assert due.want(1, action=3) == due.want(0, action=4) == ""
    await run.until(2, 1, 0)
    assert "already evaluated" in due.want(2, action=5) and "no adapter" in due.want(7, action=6)
    assert not due.take_actions(2)
    working.cancel()


async def test_the_first_version_is_due(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.export(4, 5)
    due = run.due(first_version=4)
    due.reached(5)
    assert due.waiting == {0, 4}
