"""One link over a real connection, and the upload cap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from echo_node.net import mesh_link
from echo_node.net.mesh_link import Link, Uplink
from echo_shared.rate_cap import BURST_S

PATIENCE_S = 60.0


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, ServerConnection]]:
    there: asyncio.Future[ServerConnection] = asyncio.get_running_loop().create_future()

    async def stay(connection: ServerConnection) -> None:
        there.set_result(connection)
        await connection.wait_closed()

    async with serve(stay, "127.0.0.1", 0, compression=None, max_queue=1) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None, close_timeout=1) as socket:
            yield Link(node_id="b", socket=socket, opened_here=True), await there


async def test_sends_what_is_queued_in_order() -> None:
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        writer = asyncio.create_task(link.write(Uplink(0)))
        frames = [bytes([n]) * (n * 1_000 + 1) for n in range(50)]
        assert all(link.put(frame) for frame in frames)
        assert [await peer.recv() for _ in frames] == frames
        link.put(b"later")
        assert await peer.recv() == b"later"
        link.abort()
        await link.socket.wait_closed()
        link.put(b"too late")
        await writer


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_link, "MOST_QUEUED_BYTES", 1_000)
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        assert link.put(bytes(600)) and not link.put(bytes(600)) and link.put(bytes(400))
        writer = asyncio.create_task(link.write(Uplink(0)))
        assert [len(await peer.recv()) for _ in range(2)] == [600, 400]
        assert link.put(bytes(1_000))
        assert len(await peer.recv()) == 1_000
        writer.cancel()


async def test_what_most_nodes_wait_for_goes_first() -> None:
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        for frame, rank in ((b"leaf", 0), (b"few", -1), (b"most", -300), (b"leaf too", 0)):
            link.put(frame, rank)
        writer = asyncio.create_task(link.write(Uplink(0)))
        assert [await peer.recv() for _ in range(4)] == [b"most", b"few", b"leaf", b"leaf too"]
        writer.cancel()


async def test_few_send_at_once_first_those_that_most_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_link, "TURN_S", PATIENCE_S)
    uplink, sent, go_on = Uplink(0), list[int](), asyncio.Event()

    async def send(rank: int) -> None:
        async with uplink.turn((rank, len(sent))):
            sent.append(rank)
            await go_on.wait()

    async with asyncio.timeout(PATIENCE_S / 2), asyncio.TaskGroup() as tasks:
        first = [tasks.create_task(send(0)) for _ in range(mesh_link.SENDING_AT_ONCE)]
        waiting = [tasks.create_task(send(-rank)) for rank in (1, 5, 9, 7)]
        await asyncio.sleep(0)
        assert len(sent) == mesh_link.SENDING_AT_ONCE
        waiting[1].cancel()
        first[0].cancel()
        await asyncio.wait({first[0], waiting[1]})
        await asyncio.sleep(0)
        assert sent[mesh_link.SENDING_AT_ONCE :] == [-9], "a turn that is given up is another's"
        go_on.set()
    assert sent[mesh_link.SENDING_AT_ONCE :] == [-9, -7, -1]


async def test_a_link_that_takes_nothing_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_link, "TURN_S", 0.01)
    uplink, never = Uplink(0), asyncio.Event()

    async def stuck() -> None:
        async with uplink.turn((0, 0)):
            await never.wait()

    tasks = [asyncio.create_task(stuck()) for _ in range(3 * mesh_link.SENDING_AT_ONCE)]
    async with asyncio.timeout(PATIENCE_S), uplink.turn((1, 0)):
        pass
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(PATIENCE_S), uplink.turn((0, 0)):
        pass


async def test_no_cap_does_not_wait() -> None:
    await Uplink(0).take(2**40)


async def test_a_cap_spreads_what_goes_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    now = 100.0

    async def sleep(delay_s: float) -> None:
        nonlocal now
        waited.append(delay_s)
        now += delay_s

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    cap = Uplink(1_000)
    for _ in range(10):
        await cap.take(500)
    assert now - 100.0 == pytest.approx(10 * 0.5 - BURST_S)
    now += 60.0
    waited.clear()
    await cap.take(500)
    assert waited == [pytest.approx(0.5 - BURST_S)]
