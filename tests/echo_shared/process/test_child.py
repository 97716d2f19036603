"""Real child processes, which exchange messages through real pipes."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from echo_shared.process.child import LOG_BYTES, Child, ChildExited, describe_end, pack_frame, unpack_frame

ECHO = """
import sys
from echo_shared.process.child import ParentPipe
pipe = ParentPipe()
print("a print goes to the log")
while (frame := pipe.receive()) is not None:
    if "exit" in frame:
        sys.exit(frame["exit"])
    if "poll" in frame:
        import time
        waited = []
        while len(waited) < frame["poll"]:
            if (got := pipe.poll()) is not None:
                waited.append(got)
        frame = {"polled": [got["n"] for got in waited], "then": pipe.poll() is None, "ended": pipe.ended}
    pipe.send(frame)
sys.exit(7 if pipe.ended and pipe.receive() is None and pipe.poll() is None else 8)
"""
STUBBORN = """
import signal, time
from echo_shared.process.child import ParentPipe
pipe = ParentPipe()
pipe.send({"ready": True})
while True:
    signal.pause() if hasattr(signal, "pause") else time.sleep(1)
"""
FORKING = """
import os, signal, sys
from echo_shared.process.child import ParentPipe
pipe = ParentPipe()
if (grandchild := os.fork()) == 0:
    if "leave" in sys.argv:
        os.setsid()
    pipe.send({"left": os.getpid()})
    while True:
        signal.pause()
pipe.receive()
sys.exit(3)
"""
Starter = Callable[..., Awaitable[Child]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Starter]:
    """Yield a function that starts a child with this source code and these arguments."""
    children: list[Child] = []

    async def starter(source: str, *arguments: str) -> Child:
        (tmp_path / "child_under_test.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        child = await Child.start(
            "child_under_test",
            *arguments,
            name="test",
            log=tmp_path / "logs" / "child.log",
            env={"PYTHONPATH": path},
        )
        children.append(child)
        return child

    yield starter
    for child in children:
        await child.stop(timeout_s=0.0)


def test_frames_carry_arrays_of_any_shape_and_kind() -> None:
    frame = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": [np.float32(0.5), np.zeros((0, 4))],
        "c": {"d": None},
    }
    back = unpack_frame(pack_frame(frame)[4:])
    assert back["a"].dtype == np.int32 and back["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["b"][0] == np.float32(0.5) and back["b"][1].shape == (0, 4)
    assert back["c"] == {"d": None}


def test_a_value_that_cannot_be_packed_is_the_senders_error() -> None:
    with pytest.raises(TypeError, match="object cannot travel"):
        pack_frame({"x": object()})


async def test_frames_are_returned_in_order(start: Starter) -> None:
    child = await start(ECHO)
    for n in range(50):
        await child.send({"n": n})
    assert [(await child.receive())["n"] for _ in range(50)] == list(range(50))


async def test_big_frames_come_through_whole(start: Starter) -> None:
    child = await start(ECHO)
    big = np.random.default_rng(0).normal(size=(1_000, 3_000)).astype(np.float32)
    await child.send({"big": big})
    assert (await child.receive())["big"].tobytes() == big.tobytes()


async def test_polling_finds_an_arrived_message(start: Starter) -> None:
    child = await start(ECHO)
    await child.send({"poll": 3})
    for n in range(3):
        await child.send({"n": n})
    assert await child.receive() == {"polled": [0, 1, 2], "then": True, "ended": False}


async def test_a_child_receives_its_arguments_and_may_wait(start: Starter) -> None:
    child = await start(
        "import sys\n"
        "from echo_shared.process.child import ParentPipe\n"
        "pipe = ParentPipe()\n"
        "nothing = pipe.receive(timeout_s=0.01) is None and not pipe.ended\n"
        "pipe.send({'arguments': sys.argv[1:], 'nothing': nothing})\n"
        "pipe.send(pipe.receive(timeout_s=60))\n",
        "one",
        "two words",
    )
    assert await child.receive() == {"arguments": ["one", "two words"], "nothing": True}
    await child.send({"n": 1})
    assert await child.receive() == {"n": 1}


async def test_prints_go_to_the_log(start: Starter, tmp_path: Path) -> None:
    child = await start(ECHO)
    await child.send({"exit": 0})
    with pytest.raises(ChildExited):
        await child.receive()
    assert "a print goes to the log" in (tmp_path / "logs" / "child.log").read_text()


async def test_a_log_that_has_grown_is_set_aside_at_the_next_start(start: Starter, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    log.parent.mkdir()
    for begin in ("x" * LOG_BYTES, "y" * (LOG_BYTES + 1)):
        log.write_text(begin)
        child = await start(ECHO)
        await child.stop(timeout_s=30.0)
    assert log.read_text() == "a print goes to the log\n"
    assert log.with_name("child.log.old").read_text() == "y" * (LOG_BYTES + 1)


async def test_the_error_holds_the_childs_last_log_line(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "child.log").write_text("an earlier child's last words")
    child = await start("print('a trace', end='\\n\\n')\nraise RuntimeError('it is broken')")
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert caught.value.got == caught.value.last_words == "RuntimeError: it is broken"
    silent = await start("")
    with pytest.raises(ChildExited) as caught:
        await silent.receive()
    assert (caught.value.got, caught.value.last_words) == ("exit status 0", "")


async def test_a_child_may_send_from_several_threads(start: Starter) -> None:
    source = """
import threading
from echo_shared.process.child import ParentPipe
pipe = ParentPipe()
threads = [threading.Thread(target=lambda: [pipe.send({"n": bytes(10_000)}) for _ in range(200)]) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    child = await start(source)
    assert {len((await child.receive())["n"]) for _ in range(800)} == {10_000}


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exit status 0"),
        (-11, "killed by SIGSEGV"),
        (-200, "killed by signal 200"),
        (3221225477, "exit status 0xc0000005"),
    ],
)
def test_an_end_in_words(returncode: int, text: str) -> None:
    assert describe_end(returncode) == text


async def test_the_error_holds_the_childs_exit_status(start: Starter, tmp_path: Path) -> None:
    child = await start(ECHO)
    await child.send({"exit": 3})
    with pytest.raises(ChildExited, match="The test process ended") as caught:
        while True:
            await child.receive()
    assert caught.value.returncode == 3
    assert "child.log" in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_a_kill_is_told_to_reader_and_writer(start: Starter) -> None:
    child = await start(ECHO)
    await child.send({"n": 1})
    await child.receive()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert caught.value.returncode == -signal.SIGKILL
    with pytest.raises(ChildExited):
        for _ in range(1_000):
            await child.send({"much": bytes(100_000)})


async def test_a_closed_pipe_ends_the_child(start: Starter) -> None:
    child = await start(ECHO)
    await child.stop(timeout_s=30.0)
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert caught.value.returncode == 7
    await child.stop()


async def test_a_child_notices_a_closed_pipe_before_it_has_read_everything(start: Starter) -> None:
    child = await start(
        "import sys\n"
        "from echo_shared.process.child import ParentPipe\n"
        "pipe = ParentPipe()\n"
        "opened = not pipe.closed and pipe.receive() == {'n': 1}\n"
        "pipe.send({})\n"
        "while not pipe.closed:\n"
        "    pass\n"
        "unread = not pipe.ended and pipe.receive() == {'n': 2} and pipe.receive() is None and pipe.ended\n"
        "sys.exit(7 if opened and unread else 8)\n"
    )
    await child.send({"n": 1})
    await child.receive()
    await child.send({"n": 2})
    await child.stop()
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert caught.value.returncode == 7


async def test_a_child_that_does_not_end_is_killed(start: Starter) -> None:
    child = await start(STUBBORN)
    assert await child.receive() == {"ready": True}
    await child.stop(timeout_s=0.05)
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert caught.value.returncode != 0


async def test_a_terminated_child_ends_by_the_signal_and_may_be_terminated_again(start: Starter) -> None:
    child = await start(STUBBORN)
    assert await child.receive() == {"ready": True}
    child.terminate()
    with pytest.raises(ChildExited) as caught:
        await child.receive()
    assert caught.value.returncode == (1 if sys.platform == "win32" else -signal.SIGTERM)
    child.terminate()
    await child.stop()


def is_running(pid: int) -> bool:
    """Return True if the process runs. A zombie (ended, but its parent has not waited for it) does not run."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
@pytest.mark.parametrize("how", ["it ends", "it is killed", "it is stopped"])
async def test_a_childs_own_processes_end_with_it(start: Starter, how: str) -> None:
    child = await start(FORKING)
    grandchild = (await child.receive())["left"]
    async with asyncio.timeout(60):
        if how == "it ends":
            await child.send({})
        elif how == "it is killed":
            child.kill()
        else:
            await child.stop(timeout_s=5.0)
        with pytest.raises(ChildExited) as caught:
            await child.receive()
    assert caught.value.returncode == (-signal.SIGKILL if how == "it is killed" else 3)
    await asyncio.to_thread(psutil.wait_procs, [psutil.Process(grandchild)] if is_running(grandchild) else [], 20)
    assert not is_running(grandchild)


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
async def test_a_childs_end_is_reported_while_another_process_holds_its_pipes(start: Starter) -> None:
    child = await start(FORKING, "leave")
    grandchild = (await child.receive())["left"]
    try:
        await child.send({})
        async with asyncio.timeout(60):
            with pytest.raises(ChildExited) as caught:
                await child.receive()
            await child.stop()
        assert caught.value.returncode == 3
        assert is_running(grandchild), "it runs in its own session"
    finally:
        os.kill(grandchild, signal.SIGKILL)
        with pytest.raises(ChildExited):
            await child.receive()


@pytest.mark.skipif(sys.platform == "win32", reason="there, asyncio opens both ends")
async def test_a_start_that_is_cancelled_leaves_no_process(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = asyncio.Event()

    async def never(*_: object) -> None:
        opening.set()
        await asyncio.Future()

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_write_pipe", never)
    others = set(psutil.Process().children())
    starting = asyncio.create_task(start(STUBBORN))
    async with asyncio.timeout(60):
        await opening.wait()
        (process,) = set(psutil.Process().children()) - others
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert not process.is_running()


async def test_a_reader_that_is_cancelled_in_mid_frame_loses_nothing(start: Starter) -> None:
    child = await start(
        "from echo_shared.process.child import ParentPipe, pack_frame\n"
        "pipe = ParentPipe()\n"
        "packed = pack_frame({'n': bytes(1_000)})\n"
        "pipe._output.write(packed[:500])\n"
        "pipe._output.flush()\n"
        "pipe.receive()\n"
        "pipe._output.write(packed[500:])\n"
        "pipe._output.flush()\n"
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.5):
            await child.receive()
    await child.send({})
    assert await child.receive() == {"n": bytes(1_000)}


async def test_a_child_ends_when_its_parent_dies_in_mid_frame(tmp_path: Path) -> None:
    script = (
        "from echo_shared.process.child import ParentPipe\n"
        "pipe = ParentPipe()\n"
        "assert pipe.receive() is None and pipe.ended"
    )
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        assert process.stdin is not None
        process.stdin.write(pack_frame({"type": "x", "data": b"y" * 100})[:50])
        process.stdin.close()
        async with asyncio.timeout(60):
            assert await process.wait() == 0


async def test_the_first_frame_is_taken_before_there_is_a_thread(tmp_path: Path) -> None:
    script = (
        "import threading\n"
        "from echo_shared.process.child import ParentPipe\n"
        "pipe = ParentPipe(begun=False)\n"
        "frame = pipe.opening()\n"
        "assert threading.active_count() == 1 and not pipe.ended\n"
        "pipe.begin()\n"
        "pipe.send({'first': frame, 'second': pipe.receive()})\n"
        "assert pipe.receive() is None and pipe.ended\n"
    )
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        async with asyncio.timeout(60):
            said, _ = await process.communicate(pack_frame({"n": 1}) + pack_frame({"n": 2}))
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert unpack_frame(said[4:]) == {"first": {"n": 1}, "second": {"n": 2}}


async def test_a_pipe_that_ends_before_the_first_frame_is_reported(tmp_path: Path) -> None:
    script = (
        "from echo_shared.process.child import ParentPipe\n"
        "pipe = ParentPipe(begun=False)\n"
        "assert pipe.opening() is None and pipe.ended\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        await process.communicate(b"\x01")
    assert process.returncode == 0
