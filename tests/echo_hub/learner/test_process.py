from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import process, unquantized
from echo_hub.learner.process import LIMITS, WORKER, Learner, _command, begun
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_shared.files.full_disk import Room
from echo_shared.process.child import ChildExited, Death
from echo_shared.sampling.interface import GroupRequest
from tests.small_disk import SmallDisk

MakeGroups = Callable[[int], list[TrainingGroup]]


@pytest.mark.parametrize(("base_bits", "module"), [(0, unquantized.__name__), (4, WORKER), (8, WORKER)])
def test_only_a_quantised_base_has_bitsandbytes(base_bits: int, module: str) -> None:
    assert _command(LearnerConfig(base_bits=base_bits))[0] == module


async def test_a_cancelled_command_leaves_the_stream_whole(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path
) -> None:
    prompt = np.array([3, 4], dtype=np.int32)
    request = GroupRequest(
        lease_id=1,
        group_id=1,
        indices=tuple(range(16)),
        prompt_ids=prompt,
        seed=1,
        policy_version=1,
        temperature=0.8,
        max_tokens=32,
        stop_ids=(1, 2, 3),
    )
    learner = await Learner.start(settings, tmp_path)
    try:
        training = asyncio.create_task((await learner.train(1, make_groups(1), None)).metrics())
        await asyncio.sleep(0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        async for _ in (rollouts := learner.sample([request])):
            break
        await rollouts.aclose()
        assert learner.policy_version == 1, "the step was trained without a waiting caller"
        seen = [rollout.index async for rollout in learner.sample([request])]
        assert sorted(seen) == list(range(16))
        steps = [await learner.train(step, make_groups(step), tmp_path / f"v{step}") for step in (2, 3)]
        first, second, third = await asyncio.gather(
            learner.evaluate([request], adapter=None, greedy=True), *(step.metrics() for step in steps)
        )
        assert len(first.rollouts) == 16 and learner.policy_version == 3
        assert second["updated"] == third["updated"] == 1
        assert third["gap_s"] > 0 == third["eval_s"]
    finally:
        await learner.stop()
    await learner.stop()


async def test_a_process_that_was_begun_is_the_learners_and_ends_with_the_block(
    settings: LearnerSettings, tmp_path: Path
) -> None:
    async with begun(settings.learner, tmp_path) as spawned:
        assert spawned is not None
        learner = await Learner.start(settings, tmp_path, spawned=spawned)
        assert (learner.pid, learner.policy_version) == (spawned.pid, 0)
        await learner.stop()
    async with begun(settings.learner, tmp_path) as unused:
        assert unused is not None and psutil.pid_exists(unused.pid)
    assert not psutil.pid_exists(unused.pid)


async def test_a_process_that_cannot_start_is_reported_at_start(
    settings: LearnerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "there is none"))
    async with begun(settings.learner, tmp_path) as spawned:
        assert spawned is None
        with pytest.raises(ChildExited) as unstarted:
            await Learner.start(settings, tmp_path, spawned=spawned)
    assert unstarted.value.death is Death.UNSTARTED


HUNG = """
import sys, threading
from echo_hub.learner import serve
from echo_hub.learner.policy import Policy

compute = Policy.predicting_states

def hang(policy, batch):
    if vars(policy).get("began"):
        threading.Event().wait()
    policy.began = True
    return compute(policy, batch)

Policy.predicting_states = hang
sys.exit(serve.main())
"""


@pytest.mark.slow
async def test_a_process_without_heartbeat_or_progress_is_ended(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LIMITS", replace(LIMITS, silent_s=1.0, beat_s=0.05, look_s=0.05))
    learner = await Learner.start(settings, tmp_path)
    try:
        os.kill(learner.pid, signal.SIGSTOP)
        with pytest.raises(ChildExited) as silent:
            await (await learner.train(1, make_groups(1), None)).computed()
        assert silent.value.death is Death.SILENT
    finally:
        await learner.stop()

    (tmp_path / "hung.py").write_text(HUNG)
    # `silent_s` stays long: on a busy machine, the process could otherwise count as silent before it counts as hung.
    monkeypatch.setattr(process, "LIMITS", replace(LIMITS, beat_s=0.05, look_s=0.05, stalled_s=0.5))
    monkeypatch.setattr(process, "WORKER", "hung")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    of_learner = settings.learner.model_copy(update={"micro_batch_tokens": 64})
    learner = await Learner.start(settings.model_copy(update={"learner": of_learner}), tmp_path)
    try:
        with pytest.raises(ChildExited) as stalled:
            await (await learner.train(1, make_groups(1), None)).computed()
        assert stalled.value.death is Death.STALLED
    finally:
        await learner.stop()


async def test_a_full_disk_in_the_process_is_reported_to_the_hub(
    settings: LearnerSettings, make_groups: MakeGroups, small_disk: SmallDisk
) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    room = Room(tell=said.put_nowait)
    run_dir = small_disk.directory / "run"
    run_dir.mkdir()
    learner = await Learner.start(settings, run_dir, room=room)
    try:
        small_disk.fill()
        step = await learner.train(1, make_groups(1), run_dir / "v1")
        await step.computed()
        assert "No space left" in await asyncio.wait_for(said.get(), 60)
        small_disk.empty()
        assert (await step.metrics())["updated"] == 1
        assert await asyncio.wait_for(said.get(), 60) == ""
        assert (run_dir / "v1").is_dir()
    finally:
        await learner.stop()
