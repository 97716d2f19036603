"""The engine's process, with an engine that misbehaves as its prompt says (`odd_worker`); the parent process must
notice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings, GroupFailed
from echo_node.backends.caging import CageTerms
from echo_node.backends.process import (
    DIED,
    SILENT,
    STALLED,
    STOPPED,
    Cancelled,
    DrawnTokens,
    EngineChild,
    Finished,
    Prepared,
    WorkerNews,
)
from echo_node.backends.registry import BackendChoice
from echo_node.host.hardware import sensible_threads
from echo_shared.errors import POLICY_UNUSABLE, BackendError
from echo_shared.process import process_memory
from echo_shared.process.supervised import ChildLimits
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Scored, ScoreRequest

HANG, HOARD, NO_ROOM, NO_MEMORY, BUG, HICCUP = range(1, 7)
TALK, MUSE, BURN, SHORT = 8, 9, 10, 11
"""Token ids with which a prompt orders `odd_worker` to misbehave."""
Starter = Callable[..., Awaitable[EngineChild]]


@pytest.fixture
async def start(tmp_path: Path, odd_worker: str) -> AsyncIterator[Starter]:
    """Yield a function that starts a worker with the misbehaving engine. Its keyword arguments are those of
    ChildLimits.
    """
    engines: list[EngineChild] = []

    async def starter(*, stream_s: float = 0.0, device: str = "cpu", **limits: Any) -> EngineChild:
        engine = await EngineChild.start(
            BackendChoice(name="odd", device=device, reason="test"),
            base_dir=tmp_path,
            derived_dir=tmp_path,
            log=tmp_path / "log",
            settings=EngineSettings(width=4, stream_s=stream_s),
            limits=ChildLimits(**{"memory_bytes": 2**33, "beat_s": 0.02, "look_s": 0.05, **limits}),
            cage=CageTerms(),
        )
        engines.append(engine)
        return engine

    yield starter
    for engine in engines:
        await engine.stop()


def group(lease_id: int, *, version: int = 0, prompt: int = 0) -> GroupRequest:
    return GroupRequest(
        lease_id=lease_id,
        group_id=1,
        indices=(0,),
        prompt_ids=np.array([prompt], np.int32),
        seed=1,
        policy_version=version,
        temperature=1.0,
        max_tokens=1,
        stop_ids=(),
    )


async def take(engine: EngineChild, count: int) -> list[WorkerNews | FinishedRollout]:
    """Return the next events, at least `count`: an event with several finished rollouts becomes several."""
    events: list[WorkerNews | FinishedRollout] = []
    async for event in engine.events():
        events += event.rollouts if isinstance(event, Finished) else [event]
        if len(events) >= count:
            break
    return events


async def end_of(engine: EngineChild) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await take(engine, 1_000)
    return caught.value


async def test_a_version_is_prepared_while_another_samples(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    slow = tmp_path / "slow"
    slow.mkdir()
    await engine.add_policy(1, slow)
    await engine.submit(group(1, version=1))
    for lease_id in (2, 3):
        await engine.submit(group(lease_id))
    first = [event.lease_id for event in await take(engine, 2) if isinstance(event, FinishedRollout)]
    (slow / "go").touch()
    (last,) = await take(engine, 1)
    assert isinstance(last, FinishedRollout)
    assert (first, last.lease_id) == ([2, 3], 1)
    assert last.completion_ids.tolist() == [1]


async def test_a_version_is_prepared_before_it_has_work(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    for version in (1, 2):
        await engine.add_policy(version, tmp_path / f"v{version}")
    await engine.submit(group(1, version=2))  # One thread prepares versions in order, so version 1 is prepared first.
    (rollout,) = await take(engine, 1)
    assert isinstance(rollout, FinishedRollout)
    assert rollout.completion_ids.tolist() == [2]


async def test_a_cancel_is_heard_while_an_adapter_is_prepared(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    (tmp_path / "slow").mkdir()
    await engine.add_policy(1, tmp_path / "slow")
    await engine.submit(group(1, version=1))
    await engine.cancel(1)
    await engine.drop_policy(1)
    await engine.submit(group(2, version=1))
    cancelled, failed = await take(engine, 2)
    assert isinstance(failed, GroupFailed) and cancelled == Cancelled(lease_id=1)
    assert (failed.lease_id, failed.code) == (2, "unknown_policy")
    (tmp_path / "slow" / "go").touch()  # Let the preparing thread end: otherwise it would keep the process alive.


async def test_an_adapter_is_freed_once_it_is_unknown_and_unused(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    for version in (1, 2):
        await engine.add_policy(version, tmp_path / f"v{version}")
    await engine.submit(group(1, version=1))
    await take(engine, 1)
    await engine.drop_policy(1)
    await engine.submit(group(2, version=2))
    await take(engine, 1)
    await engine.stop()
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["opened odd cpu 4", "set v1", "set v2", "freed v1", "closed"]


async def test_a_replaced_version_is_not_sampled_with_its_old_adapter(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    await engine.add_policy(1, tmp_path / "old")
    await engine.submit(group(1, version=1))
    await take(engine, 1)
    await engine.add_policy(1, tmp_path / "new")
    await engine.submit(group(2, version=1))
    await take(engine, 1)
    await engine.stop()
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["opened odd cpu 4", "set old", "set new", "freed old", "closed"]


async def test_kept_keys_go_with_their_version_and_when_memory_is_short(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    assert engine.kept == KeptKeys()
    await engine.submit(group(1))
    await take(engine, 1)
    assert engine.kept == KeptKeys(kept_bytes=7)
    await engine.add_policy(1, tmp_path / "new")
    await engine.drop_policy(1)
    await engine.submit(group(2))
    await take(engine, 1)
    assert engine.kept == KeptKeys(kept_bytes=7, hits=2)
    short = await start()
    await short.submit(group(1, prompt=SHORT))
    await take(short, 1)
    assert short.kept == KeptKeys()


async def test_a_damaged_adapter_fails_each_group_that_names_it(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    await engine.add_policy(1, tmp_path / "damaged")
    for lease_id in (1, 2):
        await engine.submit(group(lease_id, version=1))
    await engine.submit(group(3))
    events = await take(engine, 3)
    assert [(event.lease_id, event.code) for event in events if isinstance(event, GroupFailed)] == [
        (1, POLICY_UNUSABLE),
        (2, POLICY_UNUSABLE),
    ]


async def test_an_engine_with_hiccups_continues(start: Starter) -> None:
    engine = await start()
    await engine.submit(group(1, prompt=HICCUP))
    await engine.submit(group(2))
    failed, finished = await take(engine, 2)
    assert isinstance(failed, GroupFailed)
    assert isinstance(finished, FinishedRollout)


async def test_sampled_tokens_are_reported_regularly_and_before_a_cancel_ends(start: Starter, tmp_path: Path) -> None:
    engine = await start(stream_s=0.01)
    await engine.submit(group(7, prompt=TALK))
    drawn: list[int] = []
    tellings = 0
    async for event in engine.events():
        if isinstance(event, Cancelled):
            break
        assert isinstance(event, DrawnTokens)
        (part,) = event.parts
        assert (part.lease_id, part.index, part.start) == (7, 0, len(drawn))
        assert part.logprobs.tolist() == [-float(token) for token in part.ids]
        drawn += part.ids.tolist()
        tellings += 1
        if tellings == 3:
            await engine.cancel(7)
    assert event == Cancelled(lease_id=7)
    await engine.submit(group(8))
    (after,) = await take(engine, 1)
    assert isinstance(after, FinishedRollout)
    await engine.stop()
    assert f"cancelled 7 {len(drawn)}" in (tmp_path / "log").read_text()
    assert drawn == [*range(len(drawn))]


async def test_a_slow_engine_reports_to_its_node_after_each_step(start: Starter) -> None:
    engine = await start(stream_s=600.0)
    await engine.submit(group(7, prompt=MUSE))
    told = await take(engine, 3)
    assert [
        (one.for_hub, one.parts[0].start, one.parts[0].ids.tolist()) for one in told if isinstance(one, DrawnTokens)
    ] == [
        (False, 0, [0]),
        (False, 1, [1]),
        (False, 2, [2]),
    ]
    await engine.cancel(7)
    async for event in engine.events():
        if isinstance(event, Cancelled):
            break
        assert isinstance(event, DrawnTokens) and len(event.parts[0].ids) == 1


async def test_an_engine_keeps_its_share_of_the_processor(start: Starter) -> None:
    engine = await start()
    process, cores = psutil.Process(engine.pid), sensible_threads()
    share = 0.25 / cores
    await engine.limit_duty(share)
    await engine.submit(group(7, prompt=BURN))
    await asyncio.sleep(0.2)
    began, before_s = time.monotonic(), sum(process.cpu_times()[:2])
    await asyncio.sleep(1.5)
    used_s, passed_s = sum(process.cpu_times()[:2]) - before_s, time.monotonic() - began
    allowed_s = share * cores * passed_s
    assert used_s <= allowed_s + 0.06, "the system counts hundredths of a second"
    assert used_s >= 0.5 * allowed_s


async def test_a_gpus_engine_rests_by_the_clock_and_hears_commands_meanwhile(start: Starter) -> None:
    engine = await start(device="cuda", stream_s=600.0)
    await engine.limit_duty(0.01)
    await engine.submit(group(7, prompt=MUSE))
    (first,) = await take(engine, 1)
    assert isinstance(first, DrawnTokens) and first.parts[0].start == 0
    began = time.monotonic()
    await engine.cancel(7)  # The engine now rests for 6 s, after its first step.
    assert await take(engine, 1) == [Cancelled(lease_id=7)]
    assert time.monotonic() - began < 3.0
    await engine.limit_duty(1.0)
    await engine.submit(group(8))
    (rollout,) = await take(engine, 1)
    assert isinstance(rollout, FinishedRollout) and time.monotonic() - began < 5.0


async def test_a_prepared_version_is_reported_during_sampling(start: Starter, tmp_path: Path) -> None:
    """Running rollouts move to a version only after this report. An unusable version must never be reported."""
    engine = await start(stream_s=0.01)
    await engine.submit(group(1, prompt=TALK))
    await engine.add_policy(1, tmp_path / "damaged")
    await engine.add_policy(2, tmp_path / "v2")
    news = [event for event in await take(engine, 12) if not isinstance(event, DrawnTokens)]
    assert news == [Prepared(policy_version=2)]


async def test_a_cancelled_group_reports_no_tokens(start: Starter) -> None:
    engine = await start()
    await engine.submit(group(7, prompt=TALK))
    await engine.cancel(9)
    await engine.cancel(7)
    assert await take(engine, 2) == [Cancelled(lease_id=9), Cancelled(lease_id=7)]


@pytest.mark.parametrize("prompt", [NO_ROOM, NO_MEMORY])
async def test_an_engine_out_of_memory_is_given_up(start: Starter, prompt: int) -> None:
    engine = await start()
    await engine.submit(group(1, prompt=prompt))
    assert (await end_of(engine)).code == OUT_OF_MEMORY


async def test_a_model_that_does_not_fit_is_out_of_memory_too(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "enough.json").write_text("2")
    with pytest.raises(BackendError) as caught:
        await start()
    assert (caught.value.code, caught.value.got) == (OUT_OF_MEMORY, "width 4")


async def test_a_worker_over_its_memory_cap_is_killed(start: Starter) -> None:
    cap = 200 * 2**20
    engine = await start(memory_bytes=cap)
    await engine.submit(group(1))
    await take(engine, 1)
    await engine.submit(group(2, prompt=HOARD))
    error = await end_of(engine)
    assert error.code == OUT_OF_MEMORY
    assert error.got is not None and "0.20 GiB allowed" in error.got


async def test_a_crash_gives_the_reason(start: Starter) -> None:
    engine = await start()
    await engine.submit(group(1, prompt=BUG))
    error = await end_of(engine)
    assert error.code == DIED
    assert error.what == "The engine's process ended: exit status 1."
    assert error.got == "RuntimeError: a bug in the engine"


async def test_an_engine_that_stalls_is_killed(start: Starter) -> None:
    engine = await start(stalled_s=0.1)
    await engine.submit(group(1))
    await take(engine, 1)
    await engine.submit(group(2, prompt=HANG))
    error = await end_of(engine)
    assert (error.code, error.what) == (STALLED, "The engine's process stalled.")


async def test_a_measurement_that_stalls_is_the_workers_end(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 2, "max_position_embeddings": 64}')
    engine = await start(stalled_s=0.3)
    # The measuring prompts contain random tokens 0 and 1. A prompt that begins with 1 (HANG) makes the engine hang.
    with pytest.raises(BackendError) as caught:
        await engine.measure(widths=(1,), budget_s=0.1)
    assert caught.value.code == STALLED


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_a_worker_that_falls_silent_is_killed(start: Starter) -> None:
    engine = await start(silent_s=1.0)
    os.kill(engine.pid, signal.SIGSTOP)
    error = await end_of(engine)
    assert error.code == SILENT
    assert error.got is not None and error.got.startswith("no sign of life in 1 s")
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("counts", "code"), [((3, 4), OUT_OF_MEMORY), ((3, 3), DIED), ((None, None), OUT_OF_MEMORY)])
async def test_a_kill_by_the_kernel_counts_as_out_of_memory(
    counts: tuple[int | None, int | None], code: str, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux counts its out-of-memory kills, and the count decides. Without a count, SIGKILL is taken for such a
    kill.
    """
    monkeypatch.setattr(process_memory, "kernel_kills", iter(counts).__next__)
    engine = await start()
    os.kill(engine.pid, signal.SIGKILL)
    error = await end_of(engine)
    assert error.code == code
    assert code == DIED or (error.got is not None and "GiB" in error.got)


async def test_a_reader_is_told_that_the_engine_stopped(start: Starter) -> None:
    engine = await start()
    await engine.stop()
    assert (await end_of(engine)).code == STOPPED


def completion(name: str, *versions: int, prompt: int = 0) -> ScoreRequest:
    return ScoreRequest(
        rollout_id=name,
        prompt_ids=np.array([prompt], np.int32),
        completion_ids=np.arange(len(versions), dtype=np.int32),
        versions=tuple((version, 1) for version in versions),
        temperature=0.5,
    )


async def test_a_completion_is_scored_with_each_of_its_versions(start: Starter, tmp_path: Path) -> None:
    engine = await start()
    assert engine.scores
    await engine.add_policy(1, tmp_path / "one")
    await engine.score(completion("1-0", 0, 1))
    (found,) = await take(engine, 1)
    assert isinstance(found, Scored) and (found.rollout_id, found.below.tolist()) == ("1-0", [0.25, 0.25])
    log = (tmp_path / "log").read_text()
    assert "scored 2 1 0.5" in log and "scored 3 2 0.5" in log
    assert log.index("scored 2") < log.index("set one") < log.index("scored 3")


@pytest.mark.parametrize("how", [NO_ROOM, HICCUP])
async def test_an_impossible_score_request_ends_nothing(start: Starter, how: int) -> None:
    engine = await start()
    await engine.score(completion("1-0", 0, prompt=how))
    await engine.score(completion("2-0", 9))
    await engine.submit(group(5))
    found = await take(engine, 3)
    assert {len(one.below) for one in found if isinstance(one, Scored)} == {0}
    assert [one.lease_id for one in found if isinstance(one, FinishedRollout)] == [5]


async def test_sampling_goes_first(start: Starter) -> None:
    engine = await start()
    for lease_id in range(3):
        await engine.submit(group(lease_id))
    await engine.score(completion("1-0", 0))
    kinds = [type(one) for one in await take(engine, 4)]
    assert kinds == [FinishedRollout, FinishedRollout, FinishedRollout, Scored]
