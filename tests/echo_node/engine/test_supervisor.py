"""The supervisor of an engine's process, with real processes that misbehave on request: its events, and what it
remembers on disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from echo_node.backends.gpu_cage import GPU_UNUSABLE, Fit, GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.core.events import (
    EngineLost,
    EngineReady,
    LeaseCancelled,
    LeaseFailed,
    RolloutsDrawn,
    RolloutsFinished,
)
from echo_node.host.artefact_files import content_here, let_stand_in, write_marker
from echo_shared.artefacts.hashed_files import describe_file
from echo_shared.artefacts.manifest import Manifest
from echo_shared.cage.guards import GUARDS
from echo_shared.cage.leeway import SEALED
from echo_shared.delta.base_weights import NO_WEIGHTS
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import Fetched, LeaseReturned
from tests.echo_node.engine.running import PATIENCE_S, Engines

pytestmark = pytest.mark.usefixtures("odd_worker")

FINE, HANG, HOARD, NO_ROOM, NO_MEMORY, BUG, HICCUP, RANT, TALK = range(9)
"""Faults that `odd_worker` knows by these names."""
TORCH = BackendChoice(name="torch", device="cpu", reason="test")
LLAMA = BackendChoice(name="llama_cpp", device="cpu", reason="test")
Starter = Callable[..., Awaitable[Any]]


class Bench(Engines):
    async def sample(self, prompt: int) -> Any:
        """Sample a group; its prompt selects a fault. Return the next event."""
        await self.engine.submit(
            GroupRequest(
                lease_id=1,
                group_id=1,
                indices=(0,),
                prompt_ids=np.array([prompt], np.int32),
                seed=1,
                policy_version=0,
                temperature=1.0,
                max_tokens=1,
                stop_ids=(),
            )
        )
        return await self.next()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, LLAMA)
    yield bench
    await bench.end()


async def test_a_gpu_that_does_not_start_is_reported_with_advice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuCages, "find", lambda *_: Fit(leeway=SEALED, failure="cuInit failed with error 304"))
    lost = await bench.start()
    assert isinstance(lost, EngineLost) and lost.cause == "died" and lost.code == GPU_UNUSABLE
    assert "(cuInit failed with error 304)" in lost.what and "echo-node doctor" in lost.what


async def test_an_engine_waits_for_the_start_of_the_nodes_other_engines(bench: Bench) -> None:
    bench.device = "cuda:1"
    others = psutil.Process().children()
    async with bench.turn:
        starting = asyncio.create_task(bench.start())
        await asyncio.sleep(0)
        await bench.engine.end()
        assert await starting == EngineLost(
            what="The engine was ended before it was up.", cause="stopped", device="cuda:1"
        )
        starting = asyncio.create_task(bench.start())
        for _ in range(100):
            await asyncio.sleep(0)
        assert [child for child in psutil.Process().children() if child not in others] == []
    assert (await starting).device == "cuda:1" and not bench.turn.locked()


async def test_an_engine_gives_its_turn_back_however_its_start_ends(bench: Bench) -> None:
    (bench.directory / "none.json").touch()
    assert isinstance(await bench.start(), EngineLost) and not bench.turn.locked()
    (bench.directory / "none.json").unlink()
    starting = asyncio.create_task(bench.start())
    async with asyncio.timeout(PATIENCE_S):
        while not bench.turn.locked():  # noqa: ASYNC110 - the lock tells nobody.
            await asyncio.sleep(0.001)
    await bench.end()
    starting.cancel()
    assert not bench.turn.locked()


async def test_an_engine_too_wide_for_memory_is_halved_and_the_width_stored(bench: Bench) -> None:
    (bench.directory / "enough.json").write_text("10")
    lost = await bench.start()
    assert lost == EngineLost(what="It is too big. (width 64)", cause="out_of_memory", code="out_of_memory", width=0)
    lost = await bench.start(16)
    assert (lost.cause, lost.width) == ("out_of_memory", 16)
    assert await bench.start(8) == EngineReady(width=8, scores=True)
    assert await bench.start() == EngineReady(width=8, scores=True)
    assert await bench.start(width=4) == EngineReady(width=4, scores=True)
    assert await bench.start(width=32) == EngineReady(width=8, scores=True)
    assert [entry["width"] for entry in json.loads((bench.directory / "widths.json").read_text()).values()] == [8]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes in the file system")
async def test_an_engine_ended_while_its_width_is_stored_does_not_survive(bench: Bench) -> None:
    widths = bench.directory / "widths.json"
    os.mkfifo(widths)
    others = psutil.Process().children()
    starting = asyncio.create_task(bench.start(8))
    door = await opened_for_reading(widths)
    engines = [child for child in psutil.Process().children() if child not in others]
    await bench.end()
    starting.cancel()
    os.close(door)
    assert len(engines) == 1 and not engines[0].is_running()


async def opened_for_reading(pipe: Path) -> int:
    """Return the writing end of `pipe` once another process has opened it for reading."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                await asyncio.sleep(0.01)


async def test_a_width_limit_does_not_hold_for_another_engine(bench: Bench) -> None:
    assert await bench.start(8) == EngineReady(width=8, scores=True)
    bench.choice = TORCH
    assert await bench.start() == EngineReady(width=64, scores=True)


def converted(bench: Bench) -> list[str]:
    return sorted(path.name for path in bench.directory.glob("*.gguf"))


@pytest.mark.parametrize("read", ["read.gguf", "another.gguf"])
async def test_a_running_engine_deletes_base_files_it_does_not_read(bench: Bench, read: str) -> None:
    for name in ("other.gguf", read):
        (bench.directory / name).write_text(name)
    await bench.start()
    assert converted(bench) == ["read.gguf"] * (read == "read.gguf")


async def test_an_engine_that_stands_in_for_the_first_choice_deletes_nothing(bench: Bench) -> None:
    bench.choice = TORCH
    await bench.start()
    bench.choice = LLAMA
    (bench.directory / "other.gguf").write_text("other")
    await bench.start()
    assert bench.chooser.is_fallback and converted(bench) == ["other.gguf"]
    bench.choice = TORCH
    await bench.start()
    assert converted(bench) == []


async def test_missing_weights_are_requested_if_this_node_deleted_them(bench: Bench) -> None:
    (bench.directory / "none.json").write_text("")
    lost = await bench.start()
    assert (lost.cause, lost.code) == ("died", NO_WEIGHTS)
    mark_converted(bench)
    lost = await bench.start()
    assert lost.cause == "no_weights" and content_here(bench.directory) is None


def mark_converted(bench: Bench) -> None:
    """Mark the base as verified; a converted file replaces its weights."""
    (bench.directory / "config.json").write_text("{}")
    (bench.directory / "a.safetensors").write_text("weights")
    manifest = Manifest(
        kind="base",
        run_id="run",
        name="run-base",
        policy_version=0,
        carrier="files",
        key_id=1,
        info_hash="ab" * 20,
        files=tuple(describe_file(bench.directory / name, name=name) for name in ("config.json", "a.safetensors")),
    )
    report = Fetched(info_hash=bytes(20), policy_version=None, seconds=0.5, swarm_bytes=1, web_seed_bytes=2)
    write_marker(bench.directory, manifest, report)
    converted_file = bench.directory.parent / "read.gguf"
    converted_file.write_text("converted")
    let_stand_in(bench.directory, converted_file, instead_of="*.safetensors")
    (bench.directory / "a.safetensors").unlink()


def mark_gguf(bench: Bench) -> None:
    """Mark the base as verified; it is the hub's GGUF file."""
    for name in ("config.json", "m.gguf"):
        (bench.directory / name).write_text(name)
    manifest = Manifest(
        kind="base",
        run_id="run",
        name="run-base",
        policy_version=0,
        carrier="gguf",
        key_id=1,
        info_hash="ab" * 20,
        files=tuple(describe_file(bench.directory / name, name=name) for name in ("config.json", "m.gguf")),
    )
    report = Fetched(info_hash=bytes(20), policy_version=None, seconds=0.5, swarm_bytes=1, web_seed_bytes=2)
    write_marker(bench.directory, manifest, report)


async def test_an_engine_with_the_hubs_file_names_it(bench: Bench) -> None:
    bench.directory /= "base"
    bench.directory.mkdir()
    (bench.directory / "precision.json").write_text('"q4_1"')
    ready = await bench.start()
    assert ready.precision == "q4_1"
    await bench.end()
    mark_gguf(bench)
    ready = await bench.start()
    assert ready.precision == "q4_1@base"


@pytest.mark.parametrize(("choice", "precision"), [(TORCH, "auto"), (LLAMA, "q8_0")])
async def test_an_engine_that_cannot_read_the_hubs_file_has_the_weights_fetched(
    bench: Bench, choice: BackendChoice, precision: str
) -> None:
    bench.directory /= "base"
    bench.directory.mkdir()
    mark_gguf(bench)
    bench.choice = choice
    lost = await bench.start(precision=precision)
    assert (lost.cause, lost.code) == ("no_weights", NO_WEIGHTS)
    assert not bench.directory.exists(), "the file would take space beside the weights"


async def test_no_process_starts_for_an_engine_that_reads_weights_which_were_deleted(bench: Bench) -> None:
    mark_converted(bench)
    (bench.directory / "b.safetensors").write_text("what a killed node left")
    bench.choice = TORCH
    lost = await bench.start()
    assert lost.cause == "no_weights" and content_here(bench.directory) is None
    assert not any(bench.directory.glob("*.safetensors")) and not (bench.directory / "log").exists()


async def test_running_out_of_memory_at_work_tells_the_width(bench: Bench) -> None:
    await bench.start()
    lost = await bench.sample(NO_ROOM)
    assert lost == EngineLost(what="No room for the keys.", cause="out_of_memory", code="out_of_memory", width=64)


async def test_a_groups_failure_reason_fits_the_message_without_private_paths(bench: Bench) -> None:
    await bench.start()
    assert await bench.sample(HICCUP) == LeaseFailed(lease_id=1, what="The engine has hiccups.", code="backend")
    failed = await bench.sample(RANT)
    assert failed.what.startswith("The engine failed. (error: no such kernel") and "\n" not in failed.what
    assert "/home/me" not in failed.what
    assert LeaseReturned(lease_id=1, indices=(0,), reason=failed.what).reason == failed.what


async def test_sampled_tokens_and_the_end_of_a_cancelled_lease_are_reported(bench: Bench) -> None:
    await bench.start()
    drawn = await bench.sample(TALK)
    assert isinstance(drawn, RolloutsDrawn) and drawn.parts[0].lease_id == 1
    await bench.engine.cancel(1)
    while isinstance(news := await bench.next(), RolloutsDrawn):
        assert drawn.parts[0].start < news.parts[0].start
        drawn = news
    assert news == LeaseCancelled(lease_id=1)


async def test_a_device_that_vanished_and_is_back_gets_the_work_again(bench: Bench) -> None:
    bench.choice = TORCH
    await bench.start()
    bench.choice = LLAMA  # The better device vanishes, and the next request (BUG) ends the engine that runs on it.
    await bench.sample(BUG)
    assert isinstance(await bench.start(), EngineReady)
    assert (bench.chooser.choice, bench.changed.is_set()) == (LLAMA, True)
    bench.changed.clear()
    bench.choice = TORCH
    lost = await bench.sample(HANG)  # The engine hangs, but the supervisor ends it.
    assert (lost.cause, lost.what) == ("stopped", "The engine's process was stopped.")
    assert isinstance(await bench.start(), EngineReady)
    assert (bench.chooser.choice, bench.changed.is_set()) == (TORCH, True)
    log = (bench.directory / "log").read_text()
    assert [line.split()[1] for line in log.splitlines() if line.startswith("opened")] == [
        "torch",
        "llama_cpp",
        "torch",
    ]


def until_stopped(process: psutil.Process) -> None:
    while process.status() != psutil.STATUS_STOPPED:
        pass


async def test_an_engine_that_is_suspended_stands_still_and_continues(bench: Bench) -> None:
    await bench.start()
    assert bench.engine.pid is not None
    process = psutil.Process(bench.engine.pid)
    bench.engine.suspend()
    asking = asyncio.create_task(bench.sample(FINE))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(until_stopped, process)
    assert not asking.done()
    bench.engine.resume()
    assert isinstance(await asking, RolloutsFinished)


async def test_a_stopped_engine_reports_its_end_once(bench: Bench) -> None:
    await bench.start()
    bench.engine.suspend()
    await bench.engine.end()
    assert (await bench.next()).cause == "stopped" and bench.engine.pid is None
    await bench.start()
    lost = asyncio.create_task(bench.sample(HANG))
    await asyncio.sleep(0)
    await bench.engine.end()
    assert (await lost).cause == "stopped"
    starting = asyncio.create_task(bench.start())
    await asyncio.sleep(0)  # The engine's process does not exist yet.
    assert bench.engine.pid is None
    await bench.engine.end()
    assert await starting == EngineLost(what="The engine was ended before it was up.", cause="stopped")
    assert bench.events.empty()


async def test_a_machine_without_any_engine_is_reported_and_may_get_one_later(bench: Bench) -> None:
    await bench.start()
    bench.choice = None
    assert await bench.start() == EngineLost(what="There is no engine.", cause="died", code="backend", width=0)
    bench.choice = LLAMA
    assert await bench.start() == EngineReady(width=64, scores=True)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere less is held, or nothing")
async def test_a_running_engines_cage_is_known(bench: Bench) -> None:
    await bench.start(8)
    assert bench.engine.held is not None and bench.engine.held.holds == tuple(GUARDS)
    await bench.engine.end()
    assert (await bench.next()).cause == "stopped"
    assert bench.engine.held is None
