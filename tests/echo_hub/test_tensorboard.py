"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo_hub import tensorboard
from echo_hub.core.effects import (
    GroupOpened,
    RolloutReceived,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRecorded,
    StepPlanned,
    StepTrained,
)
from echo_hub.core.payload import RolloutPayload
from echo_hub.dashboard.model import Changes
from echo_hub.store.store import Store
from echo_hub.tensorboard import EventFiles
from echo_shared.books import Evaluation, EvaluationKind
from echo_shared.messages import DropReason, FinishReason


def train(store: Store, step: int) -> None:
    """A step of one group of two, after one more rollout that was dropped; its reward and its time are its number."""
    ids = (f"{step}-0", f"{step}-1")
    payload = RolloutPayload(
        completion_ids=np.array([5, 6, 1], np.int32),
        behavior_logprobs=np.zeros(3, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )
    lease = RolloutsLeased(
        lease_id=step, node_id="a", group_id=step, indices=(0, 1, 2), policy_version=step - 1, deadline=1.0
    )
    store.apply([GroupOpened(group_id=step, seed=step), lease], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=(f"{step}-2",), reason=DropReason.EXPIRED)], now=1.0)
    store.apply([RolloutReceived(rollout_id=each, received_at=1.0, payload=payload) for each in ids], now=1.0)
    store.apply([ScoreRecorded(rollout_id=each, reward=float(step)) for each in ids], now=1.0)
    planned = StepPlanned(step=step, group_ids=(step,), rollout_ids=ids, staleness=(step % 3,), planned_at=1.0)
    metrics = {"loss": step / 4, "share_without_advantage": 0.5, "train_s": 2.0, "eval_s": 1.0}
    done = StepTrained(step=step, rollout_ids=ids, metrics=metrics, trained_at=1_000.0 + 4 * step)
    store.apply([planned, done], now=1.0)


def evaluated(version: int, accuracy: float) -> list[Evaluation]:
    greedy: dict[str, Any] = {
        "policy_version": version,
        "num_problems": 10,
        "num_unscored": 0,
        "accuracy_error": 0.125,
        "mean_reward": 0.625,
        "mean_tokens": 12.5,
        "share_truncated": 0.25,
        "seconds": 3.5,
        "evaluated_at": 2_000.0 + version,
    }
    return [
        Evaluation(kind=EvaluationKind.GREEDY, samples=1, accuracy=accuracy, pass_at={}, **greedy),
        Evaluation(kind=EvaluationKind.SAMPLED, samples=4, accuracy=accuracy / 2, pass_at={2: 0.5, 4: 0.75}, **greedy),
    ]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()


def read(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, value, wall time) of every scalar."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_what_the_store_has(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        train(store, step)
    store.record_evaluations(evaluated(0, 0.25))
    files = EventFiles(tmp_path / "tensorboard", store)
    writer = files.open()
    files.catch_up(writer)
    found = read(tmp_path / "tensorboard")
    assert found["train/loss"] == [(1, 0.25, 1_004.0), (2, 0.5, 1_008.0)]
    assert found["train/mean_reward"] == [(1, 1.0, 1_004.0), (2, 2.0, 1_008.0)]
    assert found["rollouts/per_second"] == [(2, 0.5, 1_008.0)]
    assert [value for _, value, _ in found["rollouts/staleness_max"]] == [1.0, 2.0]
    assert [value for _, value, _ in found["drops/expired"]] == [1.0, 1.0], "since the step before"
    assert found["eval/greedy_accuracy"] == [(0, 0.25, 2_000.0)]
    assert found["eval/mean_at_4"] == [(0, 0.125, 2_000.0)]
    assert found["eval/pass_at_4"] == [(0, 0.75, 2_000.0)]
    expected = {"train/train_s", "train/eval_s", "train/share_without_advantage", "eval/greedy_accuracy_error"}
    assert expected < set(found)

    train(store, 3)
    store.record_evaluations(evaluated(3, 0.5))
    files.catch_up(writer)
    files.catch_up(writer)
    found = read(tmp_path / "tensorboard")  # The writer is still open: what is written can be seen.
    assert [step for step, _, _ in found["train/loss"]] == [1, 2, 3]
    assert [(step, value) for step, value, _ in found["eval/greedy_accuracy"]] == [(0, 0.25), (3, 0.5)]
    writer.close()


def test_more_steps_than_one_read_gives(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "STEPS_A_READ", 2)
    for step in range(1, 6):
        train(store, step)
    files = EventFiles(tmp_path / "tensorboard", store)
    writer = files.open()
    assert [files.catch_up(writer) for _ in range(3)] == [True, True, False]
    writer.close()
    assert [step for step, _, _ in read(tmp_path / "tensorboard")["train/loss"]] == [1, 2, 3, 4, 5]


KILLED = """
import sys, time
from pathlib import Path
from echo_hub.store.store import Store
from echo_hub.tensorboard import EventFiles
files = EventFiles(Path(sys.argv[2]), Store.open(sys.argv[1]))
writer = files.open()
files.catch_up(writer)
print("written", flush=True)
sys.stdin.read()
"""


def test_after_kill_9_no_step_is_there_twice_or_missing(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        train(store, step)
    directory = tmp_path / "tensorboard"
    command = [sys.executable, "-c", KILLED, f"sqlite:///{tmp_path / 'echo.db'}", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None and hub.stdout.readline() == "written\n"
        os.kill(hub.pid, signal.SIGKILL)
    assert [step for step, _, _ in read(directory)["train/loss"]] == [1, 2, 3]
    (torn,) = directory.iterdir()
    torn.write_bytes(torn.read_bytes()[:-7])
    train(store, 4)
    again = EventFiles(directory, store)
    writer = again.open()
    again.catch_up(writer)
    writer.close()
    assert [step for step, _, _ in read(directory)["train/loss"]] == [1, 2, 3, 4]
    assert len(list(directory.iterdir())) == 1


async def test_it_follows_the_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "WRITE_EVERY_S", 0.0)
    changes = Changes()
    written = asyncio.Event()
    files = EventFiles(tmp_path / "tensorboard", store)
    catch_up = files.catch_up
    loop = asyncio.get_running_loop()

    def told(writer: Any) -> bool:
        more = catch_up(writer)
        loop.call_soon_threadsafe(written.set)
        return more

    monkeypatch.setattr(files, "catch_up", told)
    following = asyncio.create_task(files.run(changes))
    for step in (1, 2):
        train(store, step)
        changes.notify()
        async with asyncio.timeout(60):
            await written.wait()
            while len(read(tmp_path / "tensorboard").get("train/loss", ())) < step:
                written.clear()
                await written.wait()
    following.cancel()
    await asyncio.wait([following])
    assert [step for step, _, _ in read(tmp_path / "tensorboard")["train/loss"]] == [1, 2]


def test_it_loads_no_torch() -> None:
    script = "import echo_hub.tensorboard, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert {"torch", "tensorflow", "transformers"}.isdisjoint(run.stdout.split())
