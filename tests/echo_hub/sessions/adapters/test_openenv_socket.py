"""The session's socket at servers that misbehave. Each test starts its own server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from websockets.asyncio.server import ServerConnection, serve

from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions
from echo_hub.sessions.adapters.openenv_socket import OpenEnvSocket
from echo_hub.sessions.adapters.openenv_wire import ServerError, ServerState, Stepped
from echo_hub.tasks.environments.base import EnvironmentAway, NoSlot, SessionGone

Handler = Callable[[ServerConnection], Awaitable[None]]
STATE = json.dumps({"type": "state", "data": {"step_count": 0}})
OBSERVED = json.dumps({"type": "observation", "data": {"observation": {"text": "hi"}, "reward": 1, "done": False}})
QUICK = OpenEnvOptions(connect_s=0.5, answer_s=0.3, largest_kb=8)


@contextlib.asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """Run a server whose sockets are answered by `handler`; yield its address."""
    async with serve(handler, "127.0.0.1", 0) as serving:
        yield f"ws://127.0.0.1:{next(iter(serving.sockets)).getsockname()[1]}/ws"


def answering(*answers: str | bytes | None) -> Handler:
    """Return a handler that answers messages with `answers`, in order. It never answers a message for which the entry
    is None, nor messages after the last entry."""

    async def handle(connection: ServerConnection) -> None:
        for answer in answers:
            await connection.recv()
            if answer is not None:
                await connection.send(answer)
        await connection.wait_closed()

    return handle


def error(code: str, **more: object) -> str:
    return json.dumps({"type": "error", "data": {"message": "no", "code": code, **more}})


async def test_a_session_is_reset_stepped_and_asked_for_its_state() -> None:
    asked: list[str] = []

    async def handle(connection: ServerConnection) -> None:
        async for message in connection:
            asked.append(str(message))
            if answer := {"state": STATE, "reset": OBSERVED, "step": OBSERVED}.get(json.loads(message)["type"]):
                await connection.send(answer)

    async with server(handle) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        assert (await socket.reset({"seed": 3})).observation == {"text": "hi"}
        assert await socket.step({"message": "a"}) == Stepped(observation={"text": "hi"}, reward=1.0, done=False)
        assert await socket.state() == ServerState(step_count=0)
        await socket.close()
    assert [json.loads(text)["type"] for text in asked] == ["state", "reset", "step", "state", "close"]
    assert json.loads(asked[1])["data"] == {"seed": 3}


async def test_a_full_server_says_how_many_sessions_it_takes() -> None:
    async def full(connection: ServerConnection) -> None:
        await connection.send(error("CAPACITY_REACHED", active_sessions=3, max_sessions=3))

    async with server(full) as url:
        with pytest.raises(NoSlot) as raised:
            await OpenEnvSocket.open(url, QUICK)
    assert raised.value.most == 3
    assert "max_concurrent_envs" in (raised.value.do or "")


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
async def test_a_server_that_cannot_make_sessions_is_away(code: str) -> None:
    async with server(answering(error(code))) as url:
        with pytest.raises(EnvironmentAway, match="cannot make a session"):
            await OpenEnvSocket.open(url, QUICK)


async def test_a_server_whose_state_fails_before_the_reset_has_a_session() -> None:
    async with server(answering(error("EXECUTION_ERROR"), OBSERVED)) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        assert (await socket.reset({})).reward == 1.0
        await socket.close()


async def test_no_server_is_away() -> None:
    async with server(answering()) as url:
        pass
    with pytest.raises(EnvironmentAway) as raised:
        await OpenEnvSocket.open(url, QUICK)
    assert url in (raised.value.got or "")


async def test_a_server_that_is_no_websocket_is_away() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(http, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentAway) as raised:
            await OpenEnvSocket.open(f"ws://127.0.0.1:{port}/ws", QUICK)
    assert "404" in (raised.value.got or "")


async def test_a_server_that_accepts_and_says_nothing_is_away_in_time() -> None:
    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        began = time.monotonic()
        with pytest.raises(EnvironmentAway):
            await OpenEnvSocket.open(f"ws://127.0.0.1:{port}/ws", QUICK)
        assert time.monotonic() - began < 5
        listening.close()


STRANGE: dict[str, tuple[Handler, str]] = {
    "no answer": (answering(STATE, OBSERVED, None), "did not answer in time"),
    "no JSON": (answering(STATE, OBSERVED, "<html>"), "is not JSON"),
    "bytes": (answering(STATE, OBSERVED, b"\x00\xff"), "is not JSON"),
    "another kind": (answering(STATE, OBSERVED, STATE), "something else"),
    "too large": (answering(STATE, OBSERVED, json.dumps("x" * 9000)), "larger than task.options.largest_kb = 8"),
    "NaN": (answering(STATE, OBSERVED, OBSERVED.replace("1,", "NaN,")), "not a finite number"),
}


@pytest.mark.parametrize("case", STRANGE)
async def test_a_strange_answer_loses_the_session_with_a_clear_text(case: str) -> None:
    handler, said = STRANGE[case]
    async with server(handler) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        await socket.reset({})
        with pytest.raises(SessionGone) as raised:
            await socket.step({})
        assert said in str(raised.value)
        await asyncio.wait_for(socket.close(), 5)


async def test_a_server_that_closes_in_mid_step_loses_the_session() -> None:
    async def handle(connection: ServerConnection) -> None:
        for answer in (STATE, OBSERVED):
            await connection.recv()
            await connection.send(answer)
        await connection.recv()
        await connection.close(1011, "out of memory")

    async with server(handle) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        await socket.reset({})
        with pytest.raises(SessionGone, match="closed") as raised:
            await socket.step({})
        assert "code 1011 out of memory" in (raised.value.got or "")


async def test_a_connection_that_is_cut_loses_the_session() -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(STATE)
        await connection.recv()
        connection.transport.abort()

    async with server(handle) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        with pytest.raises(SessionGone) as raised:
            await socket.reset({})
        assert "without a goodbye" in (raised.value.got or "")


async def test_a_refused_reset_loses_the_session_and_a_refused_step_does_not() -> None:
    async with server(answering(STATE, error("EXECUTION_ERROR"), error("VALIDATION_ERROR"))) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        with pytest.raises(SessionGone, match="refused the reset"):
            await socket.reset({})
        assert await socket.step({}) == ServerError(code="VALIDATION_ERROR", message="no")
        await socket.close()


async def test_closing_at_a_server_that_never_answers_takes_seconds() -> None:
    async with server(answering(STATE)) as url:
        socket = await OpenEnvSocket.open(url, QUICK)
        began = time.monotonic()
        await socket.close()
        assert time.monotonic() - began < 5


class _PingSeen(logging.Handler):
    """Records whether the server's log reports that a ping arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "< PING" in record.getMessage():
            self.seen.set()


async def test_a_waiting_socket_is_kept_alive_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_hub.sessions.adapters.openenv_socket.PING_S", 0.05)
    pings = _PingSeen()
    log = logging.getLogger("websockets.server")
    log.addHandler(pings)
    log.setLevel(logging.DEBUG)
    try:
        async with server(answering(STATE)) as url:
            socket = await OpenEnvSocket.open(url, QUICK)
            await asyncio.wait_for(pings.seen.wait(), 5)
            await socket.close()
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(pings)
