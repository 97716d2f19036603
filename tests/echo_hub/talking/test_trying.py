"""Trials run in a real process with the built-in model, one at a time and within their limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.dashboard.try_page import PromptTrial, TrialRunningError, TryRequest
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.talking.trying import KEPT, Trials
from echo_shared.errors import ConfigError
from tests.echo_hub.lifecycle.gguf.test_export import make_run_with_version

CONFIG = HubConfig(learner=LearnerConfig(threads=1), training=TrainingConfig(lora_rank=2, lora_targets="q_proj,v_proj"))
BASE = resolve_base("builtin:tiny")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Make a run with version 3."""
    return make_run_with_version(tmp_path_factory.mktemp("trying"), "builtin:tiny", strength=0.5)


@pytest.fixture
async def trials(run: RunDirectory) -> AsyncIterator[Trials]:
    desk = Trials(CONFIG, run, PromptCodec.load(BASE), BASE)
    yield desk
    await desk.close()


def asked(**changes: Any) -> TryRequest:
    told = {"prompt": "12+34=", "versions": (3, 0), "samples": 2, "temperature": 1.0, "max_tokens": 8, **changes}
    return TryRequest(**told)


async def over(trial: PromptTrial, *states: str) -> PromptTrial:
    """Wait for the end of the trial, or for one of `states`."""
    async with asyncio.timeout(120):
        while not trial.is_over and trial.state not in states:  # noqa: ASYNC110  (A page looks again and again, too.)
            await asyncio.sleep(0.02)
    return trial


def processes() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "echo_hub.talking.worker" in " ".join(one.cmdline())]


async def test_two_versions_answer_beside_each_other(trials: Trials) -> None:
    trial = await over(trials.begin(asked(temperature=0.0)))
    assert (trial.state, trial.detail) == ("done", "") and trial.seconds > 0
    assert list(trial.replies) == [3, 0]
    for replies in trial.replies.values():
        assert len(replies) == 2 and replies[0].text == replies[1].text, "the likeliest tokens have no chance"
        assert all(reply.finish in ("stop", "length") and 0 < reply.num_tokens <= 8 for reply in replies)
    assert trial.replies[3][0].text != trial.replies[0][0].text
    (process,) = processes()
    assert process.nice() >= 10
    again = await over(trials.begin(asked(versions=(0,), samples=1)))
    assert again.state == "done" and again.number == trial.number + 1 and processes() == [process]
    assert trials.find(trial.number) is trial


async def test_only_one_trial_runs_and_it_can_be_stopped(trials: Trials) -> None:
    trial = trials.begin(asked())
    with pytest.raises(TrialRunningError, match=f"Trial {trial.number} is running"):
        trials.begin(asked())
    trials.stop(99)
    assert not trial.is_over
    trials.stop(trial.number)
    assert (await over(trial)).detail == "Stopped by the operator."
    assert (await over(trials.begin(asked(samples=1)))).state == "done"


async def test_a_trial_ends_at_its_limit_with_its_process(run: RunDirectory) -> None:
    desk = Trials(CONFIG, run, PromptCodec.load(BASE), BASE, limit_s=0.0)
    try:
        trial = await over(desk.begin(asked()))
        assert trial.state == "stopped" and "Stopped after 0 s" in trial.detail and processes() == []
    finally:
        await desk.close()


async def test_the_process_ends_when_nobody_tries_anything(run: RunDirectory) -> None:
    desk = Trials(CONFIG, run, PromptCodec.load(BASE), BASE, idle_s=0.2)
    try:
        await over(desk.begin(asked(samples=1, max_tokens=1)))
        (process,) = processes()
        await asyncio.to_thread(process.wait, 30)
        assert processes() == []
    finally:
        await desk.close()


async def test_what_cannot_be_tried_is_refused_at_once(trials: Trials) -> None:
    with pytest.raises(ConfigError, match=r"(?s)does not exist.*version 2.*3"):
        trials.begin(asked(versions=(2,)))
    with pytest.raises(ConfigError, match="too long for this model"):
        trials.begin(asked(prompt="1+" * 200))
    assert (await over(trials.begin(asked(samples=1)))).state == "done", "nothing is in its way"


async def test_a_base_that_cannot_be_loaded_is_told(run: RunDirectory, tmp_path: Path) -> None:
    desk = Trials(CONFIG, run, PromptCodec.load(BASE), tmp_path)
    try:
        trial = await over(desk.begin(asked()))
        assert trial.state == "failed" and "cannot be loaded" in trial.detail and processes() == []
    finally:
        await desk.close()


async def test_a_process_that_dies_fails_its_trial_only(trials: Trials) -> None:
    trial = trials.begin(asked(samples=8, max_tokens=200, temperature=5.0))
    await over(trial, "sampling")
    processes()[0].kill()
    assert (await over(trial)).state in ("failed", "done")
    assert (await over(trials.begin(asked(samples=1)))).state == "done"


async def test_only_the_newest_trials_are_kept(trials: Trials) -> None:
    numbers = []
    for _ in range(KEPT + 1):
        numbers.append(trials.begin(asked()).number)
        trials.stop(numbers[-1])
        await over(trials.find(numbers[-1]) or pytest.fail("it is the newest"))
    assert [trials.find(number) is not None for number in (numbers[0], numbers[1], numbers[-1])] == [False, True, True]


def test_the_form_begins_with_the_run_s_own_settings(run: RunDirectory) -> None:
    desk = Trials(CONFIG, run, PromptCodec.load(BASE), BASE)
    assert (desk.versions, desk.usual.versions, desk.off) == ([0, 3], (3, 0), "")
    assert desk.usual.max_tokens == CONFIG.sampling.max_tokens
    off = CONFIG.model_copy(update={"server": ServerConfig(try_device="off")})
    assert "server.try_device" in Trials(off, run, PromptCodec.load(BASE), BASE).off
