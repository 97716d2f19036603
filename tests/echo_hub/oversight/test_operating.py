"""The hub finds problems of a run and reports them to a webhook. The parts run alone here, with a real store and a real
receiver; `test_hub` tests the whole hub.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.dashboard.model import RunState, RunView
from echo_hub.operation import watching as watching_module
from echo_hub.operation.problems import ProblemKind, RunProblems
from echo_hub.oversight.operating import Description, Operation, RunObserver, summary
from echo_hub.run.directory import RunDirectory
from echo_hub.spread.holdings import DistributionStatus
from echo_hub.views.run import LEARNER_IS_DOWN, Moment
from echo_shared.records.run import Accounting
from tests.echo_hub.operation.receivers import Hook, webhook

VIEW = RunView(
    as_of=1.0,
    run_id="r",
    name="spring",
    mode="async",
    task="arithmetic",
    base_model="builtin:tiny",
    join_command="echo-node join http://hub",
    state=RunState.RUNNING,
    started_at=1.0,
    steps_total=2,
    trained_step=2,
    group_size=8,
    max_staleness=2,
    accounting=Accounting(leased=9, trained=8),
    nodes_useful=1,
)


class Pages:
    """Stand-in for the pages: a scripted view of the run, and its state at this moment."""

    class Server:
        url = "http://hub"

    def __init__(self, moment: Moment, problems: RunProblems) -> None:
        self._moment = moment
        self._problems = problems

    async def run_view(self) -> RunView:
        return VIEW

    def now(self) -> Moment:
        return replace(self._moment, watched=self._problems.active)


async def posted(hook: Hook, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        while len(hook.got) < count:
            hook.news.clear()
            await hook.news.wait()
    return [json.loads(body) for body, _ in hook.got]


async def test_a_dead_learner_is_an_event_a_problem_and_an_alert_and_so_is_the_end(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching_module, "LOOK_S", 0.001)
    driven = await drive(running=False)
    problems = RunProblems(learner_idle_s=600.0, disk_free_bytes=2_000_000_000)
    moment = Moment(
        status=driven.driver.coordinator.status(),
        distribution=DistributionStatus(),
        num_received=0,
        rollouts_gone_on=0,
        tokens_saved=0,
        learner_is_starting=False,
        learner_is_down=True,
        learner_evaluates=False,
        last_is_published=False,
        finished=False,
        join_command="",
    )

    pages = Pages(moment, problems)
    async with webhook() as hook:
        settings = AlertsConfig(webhook_url=hook.url)
        observer = RunObserver(
            RunDirectory(tmp_path), store=driven.async_store, moments=pages, pages=pages, changes=driven.pages
        )
        operation = Operation(
            settings,
            driver=driven.driver,
            store=driven.async_store,
            progress=driven.progress,
            observer=observer,
            pages=pages,
            problems=problems,
            description=Description(run_id="r", name="spring", server=Pages.Server()),
        )
        working = asyncio.create_task(operation.run())
        (down,) = await posted(hook, 1)
        assert (down["kind"], down["state"], down["message"]) == ("learner_down", "began", LEARNER_IS_DOWN)
        assert down["run"] == {"id": "r", "name": "spring", "url": "http://hub"}
        assert driven.pages.number and operation.watching.active[0].kind is ProblemKind.LEARNER_DOWN
        driven.progress.finished.set()
        _, end = await posted(hook, 2)
        assert (end["kind"], end["message"]) == ("finished", summary(VIEW))
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working


def test_a_run_in_a_sentence() -> None:
    assert summary(VIEW) == "The run is finished: 2 steps, 8 rollouts of 1 node."
