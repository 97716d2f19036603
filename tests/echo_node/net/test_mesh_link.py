"""One link (a proven connection) between two nodes, over a real socket, and the limit on its upload rate."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.dissemination.links import HUB
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import WanSet, open_wan
from echo_node.net import mesh_link
from echo_node.net.mesh_link import Link, SendCap
from echo_shared.wire.rate_cap import BURST_S

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


async def test_queued_messages_are_sent_in_order() -> None:
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        writer = asyncio.create_task(link.write(SendCap(0)))
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
        writer = asyncio.create_task(link.write(SendCap(0)))
        assert [len(await peer.recv()) for _ in range(2)] == [600, 400]
        assert link.put(bytes(1_000))
        assert len(await peer.recv()) == 1_000
        writer.cancel()


async def test_pieces_that_most_nodes_wait_for_go_first() -> None:
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        for frame, rank in ((b"leaf", 0), (b"few", -1), (b"most", -300), (b"leaf too", 0)):
            link.put(frame, rank)
        writer = asyncio.create_task(link.write(SendCap(0)))
        assert [await peer.recv() for _ in range(4)] == [b"most", b"few", b"leaf", b"leaf too"]
        writer.cancel()


async def test_few_links_send_at_once_and_the_most_awaited_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_link, "TURN_S", PATIENCE_S)
    uplink, sent, go_on = SendCap(0), list[int](), asyncio.Event()

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
        assert sent[mesh_link.SENDING_AT_ONCE :] == [-9], "an abandoned turn goes to another message"
        go_on.set()
    assert sent[mesh_link.SENDING_AT_ONCE :] == [-9, -7, -1]


async def test_a_link_that_takes_nothing_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_link, "TURN_S", 0.01)
    uplink, never = SendCap(0), asyncio.Event()

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
    await SendCap(0).take(2**40)


async def test_a_cap_spreads_uploads_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    now = 100.0

    async def sleep(delay_s: float) -> None:
        nonlocal now
        waited.append(delay_s)
        now += delay_s

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    cap = SendCap(1_000)
    for _ in range(10):
        await cap.take(500)
    assert now - 100.0 == pytest.approx(10 * 0.5 - BURST_S)
    now += 60.0
    waited.clear()
    await cap.take(500)
    assert waited == [pytest.approx(0.5 - BURST_S)]


@pytest.mark.skipif(not mesh_link.CAN_LOOK, reason="this system does not count what a connection sends")
async def test_a_link_knows_the_arrived_bytes_until_it_ends() -> None:
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        writer = asyncio.create_task(link.write(SendCap(0)))
        link.put(bytes(100_000))
        assert len(await peer.recv()) == 100_000
        link.pace(10**9)
        sent = link.look()
        assert sent is not None and sent.num_packets > 0 and sent.arrived_bytes > 0
        link.abort()
        await link.socket.wait_closed()
        assert link.look() is None
        link.pace(10**9)
        writer.cancel()


async def test_where_nothing_is_counted_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_link, "CAN_LOOK", False)
    async with asyncio.timeout(PATIENCE_S), linked() as (link, peer):
        uplink = SendCap(0)
        writer = asyncio.create_task(link.write(uplink))
        link.put(bytes(100_000))
        assert len(await peer.recv()) == 100_000
        assert link.look() is None and uplink.bytes_per_s == 0
        writer.cancel()


SEND = """
import asyncio, sys
from websockets.asyncio.server import serve
from echo_node.net.mesh_link import Link, SendCap

async def main():
    uplink, received = SendCap(int(sys.argv[1])), asyncio.Semaphore(0)

    async def send(connection):
        link = Link(node_id="b", socket=connection, opened_here=False)
        writer = asyncio.create_task(link.write(uplink))
        for _ in range(50):
            link.put(bytes(32_768))
        await connection.recv()
        received.release()
        await connection.wait_closed()
        writer.cancel()

    async with serve(send, "0.0.0.0", 5000, compression=None):
        print("listening", flush=True)
        for _ in range(2):
            await received.acquire()
        print(uplink.bytes_per_s, flush=True)

asyncio.run(main())
"""
RECEIVE = """
import asyncio, sys
from websockets.asyncio.client import connect

async def receive():
    async with connect(f"ws://{sys.argv[1]}:5000", compression=None, proxy=None) as connection:
        for _ in range(50):
            await connection.recv()
        await connection.send("all")
        await connection.wait_closed()

async def main():
    await asyncio.gather(receive(), receive())

asyncio.run(main())
"""


@pytest.mark.skipif(not homes.can_emulate(), reason="an emulated network takes root, iproute2 and TUN devices")
@pytest.mark.parametrize("limit", [0, 700_000])
def test_a_node_measures_its_own_line(limit: int) -> None:
    home = Home(up=8, down=100, delay_ms=15)
    send = [sys.executable, "-c", SEND, str(limit)]
    with (
        open_wan(1, WanSet(loss=0.0, homes=(home,))) as wan,
        subprocess.Popen([*wan.command(1), *send], stdout=subprocess.PIPE, text=True) as sender,
    ):
        assert sender.stdout is not None
        assert sender.stdout.readline() == "listening\n"
        receive = [*wan.command(HUB), sys.executable, "-c", RECEIVE, wan.address(1)]
        subprocess.run(receive, check=True, timeout=PATIENCE_S)
        learnt = json.loads(sender.stdout.readline())
    assert 0 < learnt < (limit + 1 if limit else 1.1e6), "the line carries a megabyte a second"
