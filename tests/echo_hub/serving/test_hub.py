"""The whole hub in this process, on an open port; tests how its parts are connected. Whole runs are in
tests/end_to_end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import aiohttp
import pytest

from echo_hub.commands.serve_line import line_of
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig, RunConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.config.task_sections import EvaluationConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.dashboard.model import Doing
from echo_hub.learner.process import begun
from echo_hub.operation.log_lines import path_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub
from echo_hub.store.events import read_events
from echo_hub.store.reports import read_evaluated_versions
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import StorageError
from echo_shared.records.run import EventFilter, RunEvent, Severity
from echo_shared.records.step_figures import LEARNING_RATE
from tests.echo_hub.judge_endpoint import FakeEndpoint

TRAINING = TrainingConfig(steps=2, groups_per_step=2, group_size=2, lora_rank=2)


def settings(**sections: object) -> HubConfig:
    return HubConfig.model_validate(
        {
            "run": RunConfig(mode="colocated"),
            "training": TRAINING,
            "evaluation": EvaluationConfig(problems=2),
            "learner": LearnerConfig(threads=1),
            "server": ServerConfig(port=0),
            **sections,
        }
    )


async def test_a_colocated_run_goes_from_its_start_to_its_end(tmp_path: Path) -> None:
    config, directory = (
        settings(training=TRAINING.model_copy(update={"warmup_steps": 1})),
        RunDirectory(tmp_path / "run"),
    )
    make_run(directory, config)
    async with open_hub(config, directory) as hub:
        assert hub.join_command == f"echo-node join {hub.url}"
        serving = asyncio.create_task(hub.serve())
        finished = asyncio.create_task(hub.progress.finished.wait())
        async with asyncio.timeout(120):
            await asyncio.wait([serving, finished], return_when=asyncio.FIRST_COMPLETED)
        assert finished.done(), serving.exception()
        view = await hub.pages.run_view()
        assert (view.trained_step, view.published_version) == (2, 2)
        assert [evaluation.greedy.policy_version for evaluation in view.evaluations] == [0, 2]
        rates = [step.figures[LEARNING_RATE.key] for step in await hub.pages.steps(0)]
        assert rates == pytest.approx([config.training.learning_rate / 2, config.training.learning_rate])
        async with aiohttp.ClientSession() as http, http.get(f"{hub.url}/healthz") as answer:
            assert answer.status == 200 and await answer.json() == {"status": "ok", "state": "finished"}
        assert view.health == hub.pages.health()
        serving.cancel()
        await asyncio.wait([serving])
    found = events(directory)
    assert [event.kind for event in found if event.kind != "log"] == [
        "hub_started",
        "version_evaluated",
        "version_evaluated",
        "run_finished",
        "hub_stopped",
    ]
    assert "The run is finished: 2 steps, 8 rollouts" in found[-2].text
    lines = [json.loads(line) for line in path_of(directory.root).read_text().splitlines()]
    assert {event.text for event in found} <= {line["message"] for line in lines}


async def test_a_hub_without_a_task_serves_and_trains_nothing(tmp_path: Path) -> None:
    config = settings(
        run=RunConfig(),
        task={"name": "none"},
        tinker={"enabled": True},
        tenants={"drawn_by": "hub"},
        trust={"verifier": "off"},
    )
    directory = RunDirectory(tmp_path / "run")
    make_run(directory, config)
    assert load_config(directory.config, {}) == config
    async with begun(config.learner, directory.root, trains=config.trains) as spawned:
        assert spawned is None
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        headers = {"Authorization": f"Bearer {hub.guard.credentials.token}"}
        async with aiohttp.ClientSession(hub.url, headers=headers) as http:
            for path in (
                "/",
                "/leaderboard",
                "/about",
                "/fleet",
                "/rollouts",
                "/actions",
                "/metrics",
                "/api/v1/run",
                "/readyz",
            ):
                async with http.get(path) as answer:
                    assert answer.status == 200, path
                    page = await answer.text()
                    assert "of 2 steps" not in page and "Held-out accuracy" not in page
            async with http.post("/api/v1/actions/evaluate") as answer:
                assert answer.status == 409 and "no task" in await answer.text()
            async with http.post("/api/v1/actions/pause") as answer:
                assert answer.status == 200
        view = await hub.pages.run_view()
        assert (view.doing, view.leasing, view.trains) == (Doing.PAUSED, "paused", False)
        assert line_of(view).startswith("ready") and "step" not in line_of(view)
        status = hub.coordinator.status()
        assert (status.groups_preparing, status.groups_open, status.finished) == (0, 0, False)
        assert not serving.done()
        serving.cancel()
        await asyncio.wait([serving])
    assert not (directory.root / "logs" / "learner.log").exists()
    assert [event.kind for event in events(directory) if event.kind != "log"] == ["hub_started", "hub_stopped"]


@pytest.mark.slow
async def test_after_a_restart_scored_rollouts_are_not_judged_again(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    """After four verdicts the judge fails. The hub reports this and is restarted; then it must request only the missing
    verdicts.
    """
    judges = {"style": {"kind": "llm", "url": endpoint.url, "model": "m", "concurrency": 1}}
    reward = {"weights": {"style": 0.5}, "judges": judges}
    config, directory = settings(reward=reward, evaluation=EvaluationConfig(problems=1)), RunDirectory(tmp_path / "run")
    make_run(directory, config)
    endpoint.script, endpoint.rule = ["<score>1</score>"] * 4, lambda said: 503
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        async with asyncio.timeout(120):
            while not any("The judge style" in said for said in hub.pages.health().reasons):  # noqa: ASYNC110 - health is polled.
                await asyncio.sleep(0.05)
        assert "(status 503: 'not now')" in hub.pages.health().reasons[0]
        view = await hub.pages.run_view()
        assert view.broken and view.trained_step == 0
        serving.cancel()
        await asyncio.wait([serving])
    with contextlib.closing(Store.open(directory.database_url)) as store:
        num_known = sum(row.reward is not None for row in store.read(read_snapshot).rollouts) + len(
            store.read(read_evaluated_versions)
        )
    assert 1 <= num_known <= 4
    endpoint.asked.clear()
    endpoint.rule = lambda said: "<score>1</score>"
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        async with asyncio.timeout(120):
            await asyncio.wait(
                [serving, asyncio.create_task(hub.progress.finished.wait())], return_when=asyncio.FIRST_COMPLETED
            )
        (first, _) = await hub.pages.steps(0)
        assert first.components["style"] == pytest.approx(0.1)
        serving.cancel()
        await asyncio.wait([serving])
    assert len(endpoint.asked) == 8 + 2 - num_known, "rollouts of both steps, and two evaluations of one problem"


def events(directory: RunDirectory) -> list[RunEvent]:
    store = Store.open(directory.database_url)
    try:
        return store.read(read_events, EventFilter(), 1_000)[::-1]
    finally:
        store.close()


async def test_a_failing_hub_logs_the_reason_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, directory = settings(), RunDirectory(tmp_path / "run")
    make_run(directory, config)

    async def fail(*_: object) -> None:
        raise StorageError("The disk is full.", got="no space left")

    monkeypatch.setattr("echo_hub.intake.service.GroupPreparation.run", fail)
    async with open_hub(config, directory) as hub:
        with pytest.raises(ExceptionGroup):
            await hub.serve()
    kinds = [(event.kind, event.severity) for event in events(directory) if event.kind != "log"]
    assert kinds[0] == ("hub_started", Severity.INFO) and kinds[-1] == ("hub_stopped", Severity.INFO)
    assert ("hub_failed", Severity.ERROR) in kinds
    assert "the hub ends: The disk is full. (no space left)" in path_of(directory.root).read_text()
