"""Real processes that crash, hang, exceed their memory or are killed. The reason of each end is reported, and no
process remains.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_shared.process import process_memory
from echo_shared.process.backoff import Restarts
from echo_shared.process.child import ChildExited, Death
from echo_shared.process.supervised import NO_HEARTBEAT, ChildLimits, Command, SupervisedChild

CHILD = """
import os, signal, sys, time
from echo_shared.process.child import ParentPipe
from echo_shared.process.heartbeat import Heartbeat

def obey(pipe, beats, frame):
    match frame["do"]:
        case "answer":
            pipe.send({"answer": frame["do"], "pid": os.getpid()})
        case "answer later":
            time.sleep(0.3)
            pipe.send({"answer": "late"})
        case "crash":
            raise RuntimeError("a bug in the child")
        case "exit":
            sys.exit(frame["status"])
        case "flood":
            for _ in range(64):
                pipe.send({"answer": bytes(2**16)})
        case "hang":
            beats.working = True
            time.sleep(1_000)
        case "hoard":
            hoard.append(os.urandom(2**20) * 256)
            time.sleep(1_000)
        case "close":
            os.closerange(3, 100)
            if not frame["yields"]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1_000)

hoard = []
pipe = ParentPipe()
opening = pipe.receive()
with Heartbeat(pipe, 0.02) as beats:
    obey(pipe, beats, opening)
    while (frame := pipe.receive()) is not None:
        obey(pipe, beats, frame)
"""
WATCHED = ChildLimits(beat_s=0.02, look_s=0.05)
Starter = Callable[..., Awaitable[SupervisedChild]]

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    (tmp_path / "watched_child.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return Command(module="watched_child", name="test", log=tmp_path / "child.log", env={"PYTHONPATH": path})


@pytest.fixture
async def start(command: Command) -> AsyncIterator[Starter]:
    children: list[SupervisedChild] = []

    async def starter(limits: ChildLimits = WATCHED, **opening: Any) -> SupervisedChild:
        child = await SupervisedChild.start(command, {"do": "answer", **opening}, limits)
        children.append(child)
        return child

    yield starter
    for child in children:
        await child.stop(timeout_s=0.0)


async def end_of(child: SupervisedChild) -> ChildExited:
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert not psutil.pid_exists(child.pid)
    return caught.value


async def test_a_child_reports_ready_and_answers_between_heartbeats(start: Starter) -> None:
    child = await start()
    assert child.ready == {"answer": "answer", "pid": child.pid}
    await child.send({"do": "answer later"})
    assert await child.receive(within_s=20.0) == {"answer": "late"}


async def test_a_crash_at_the_start(start: Starter) -> None:
    with pytest.raises(ChildExited) as caught:
        await start(do="crash")
    error = caught.value
    assert (error.death, error.returncode, error.last_words) == (Death.EXITED, 1, "RuntimeError: a bug in the child")
    assert error.what == "The test process ended: exit status 1."


async def test_a_child_that_the_system_does_not_start(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python-here"))
    with pytest.raises(ChildExited, match="cannot be started") as caught:
        await start()
    assert (caught.value.death, caught.value.returncode) == (Death.UNSTARTED, None)
    assert "no-python-here" in str(caught.value)


async def test_a_crash_is_reported_with_the_childs_error(start: Starter) -> None:
    child = await start()
    await child.send({"do": "crash"})
    error = await end_of(child)
    assert (error.death, error.got) == (Death.EXITED, "RuntimeError: a bug in the child")


async def test_an_exit_status_for_no_memory_is_out_of_memory(start: Starter) -> None:
    child = await start()
    await child.send({"do": "exit", "status": 70})
    error = await end_of(child)
    assert (error.death, error.what) == (Death.OUT_OF_MEMORY, "The test process ran out of memory.")


async def test_a_child_above_its_memory_limit_is_ended(start: Starter) -> None:
    child = await start(ChildLimits(memory_bytes=200 * 2**20, beat_s=0.02, look_s=0.05))
    await child.send({"do": "hoard"})
    error = await end_of(child)
    assert (error.death, error.what) == (Death.OUT_OF_MEMORY, "The test process exceeded its memory limit.")
    assert error.got is not None and "0.20 GiB allowed" in error.got


@posix
@pytest.mark.parametrize(
    ("counts", "death"),
    [((3, 4), Death.OUT_OF_MEMORY), ((3, 3), Death.SIGNALLED), ((None, None), Death.OUT_OF_MEMORY)],
)
async def test_a_kill_counts_as_out_of_memory_unless_the_kernel_denies_it(
    counts: tuple[int | None, int | None], death: Death, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "kernel_kills", iter(counts).__next__)
    child = await start()
    os.kill(child.pid, signal.SIGKILL)
    error = await end_of(child)
    assert (error.death, error.returncode) == (death, -signal.SIGKILL)


@posix
async def test_a_crash_by_a_signal_is_reported_to_the_sender(start: Starter) -> None:
    child = await start()
    os.kill(child.pid, signal.SIGSEGV)
    with pytest.raises(ChildExited, match="killed by SIGSEGV") as caught:
        while True:
            await child.send({"do": "answer"})
    assert caught.value.death is Death.SIGNALLED


@posix
async def test_a_silent_child_is_ended(start: Starter) -> None:
    child = await start(ChildLimits(silent_s=0.5, beat_s=0.02, look_s=0.05))
    os.kill(child.pid, signal.SIGSTOP)
    error = await end_of(child)
    assert (error.death, error.what) == (Death.SILENT, "The test process does not answer.")
    assert error.got == "no sign of life in 1 s"


async def test_a_suspended_child_is_not_missed_and_continues_later(start: Starter) -> None:
    child = await start(ChildLimits(silent_s=1.0, beat_s=0.02, look_s=0.05))
    await child.send({"do": "answer later"})
    child.suspend()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await child.receive()
    assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
    child.resume()
    assert await child.receive(within_s=20.0) == {"answer": "late"}


async def test_a_suspended_child_can_be_ended_at_once(start: Starter) -> None:
    child = await start()
    child.suspend()
    async with asyncio.timeout(5.0):
        await child.stop(timeout_s=1_000.0)
    assert (await end_of(child)).death is Death.STOPPED


async def test_a_child_without_progress_is_ended(start: Starter) -> None:
    child = await start(ChildLimits(stalled_s=0.1, beat_s=0.02, look_s=0.05))
    await child.send({"do": "hang"})
    error = await end_of(child)
    assert (error.death, error.what) == (Death.STALLED, "The test process stalled.")


async def test_a_child_that_is_not_ready_in_time_is_ended(start: Starter) -> None:
    with pytest.raises(ChildExited, match="does not get ready") as caught:
        await start(ChildLimits(ready_s=0.4, beat_s=0.02, look_s=0.05), do="hang")
    assert caught.value.death is Death.LATE


async def test_a_child_that_answers_too_late_is_ended(start: Starter) -> None:
    child = await start(NO_HEARTBEAT)
    await child.send({"do": "hang"})
    with pytest.raises(ChildExited, match="takes too long") as caught:
        await child.receive(within_s=0.2)
    assert (caught.value.death, caught.value.got) == (Death.LATE, "nothing after 0.2 s")
    assert not psutil.pid_exists(child.pid)


@posix
@pytest.mark.parametrize(("yields", "by"), [(True, signal.SIGTERM), (False, signal.SIGKILL)])
async def test_a_child_that_closes_its_pipe_is_ended(start: Starter, yields: bool, by: signal.Signals) -> None:
    child = await start(replace(NO_HEARTBEAT, ending_s=0.2))
    await child.send({"do": "close", "yields": yields})
    async with asyncio.timeout(60):
        error = await end_of(child)
    assert (error.death, error.returncode) == (Death.SILENT, -by)
    assert (error.what, error.got) == ("The test process did not end.", "lived on for 0.2 s with its pipe closed")


@posix
@pytest.mark.parametrize(
    ("ends_its_own", "by"), [(False, signal.SIGKILL), (True, signal.SIGTERM)], ids=["by force", "by SIGTERM"]
)
async def test_a_late_child_that_ends_its_own_processes_is_not_killed(
    command: Command, ends_its_own: bool, by: signal.Signals
) -> None:
    child = await SupervisedChild.start(replace(command, ends_its_own=ends_its_own), {"do": "answer"})
    await child.send({"do": "hang"})
    with pytest.raises(ChildExited) as caught:
        await child.receive(within_s=0.1)
    assert (caught.value.death, caught.value.returncode) == (Death.LATE, -by)


async def test_a_stop_is_reported_to_waiting_and_later_receivers(start: Starter) -> None:
    child = await start()
    waiting = asyncio.create_task(child.receive())
    await child.send({"do": "answer"})
    await waiting
    waiting = asyncio.create_task(child.receive())
    await asyncio.sleep(0)
    await child.stop()
    for told in (waiting, child.receive()):
        with pytest.raises(ChildExited, match="was stopped") as caught:
            await told
        assert caught.value.death is Death.STOPPED


async def test_a_stopped_child_with_much_output_ends_by_itself(start: Starter) -> None:
    child = await start()
    await child.send({"do": "flood"})
    await child.receive()
    waiting = asyncio.create_task(child.receive())
    await child.stop(timeout_s=5.0)
    with pytest.raises(ChildExited, match="was stopped") as caught:
        await waiting
        await child.receive()
    assert caught.value.returncode == 0


async def test_a_start_that_is_cancelled_leaves_none(command: Command) -> None:
    before = psutil.Process().children()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await SupervisedChild.start(command, {"do": "hang"})
    assert command.log.exists()
    assert psutil.Process().children() == before


async def test_a_child_that_keeps_dying_is_restarted_with_growing_delays_and_then_given_up(start: Starter) -> None:
    restarts = Restarts(most=4, first_s=1.0, limit_s=30.0)
    waits: list[float | None] = []
    while not waits or waits[-1] is not None:
        try:
            await start(do="exit", status=3)
        except ChildExited as error:
            assert error.returncode == 3
            waits.append(restarts.died(0.0))
    assert waits == [1.0, 2.0, 4.0, None]
