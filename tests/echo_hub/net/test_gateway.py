"""A gateway behind a real server delivers messages in order; a node that misbehaves after joining harms only its own
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace

import msgpack
import pytest
import websockets

from echo_hub.net import node_connection, pace, send_queue
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.penalties import Fault
from echo_hub.net.send_queue import Rank
from echo_shared.errors import RefusedError, StorageError
from echo_shared.wire import codec
from echo_shared.wire.codec import encode
from echo_shared.wire.message_form import MapForm
from echo_shared.wire.messages import (
    MAX_FRAME_FROM_NODE_BYTES,
    FromHub,
    Goodbye,
    Hello,
    LeaseReturned,
    Piece,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    RefusalCode,
    Refused,
    Welcome,
    specimens,
)
from tests.echo_hub.net.gateway_parts import OFFER, Hub, MakeHub, Node, hubs, revoked, status


@pytest.fixture
async def make_hub() -> AsyncIterator[MakeHub]:
    async with hubs() as make:
        yield make


@pytest.fixture
async def hub(make_hub: MakeHub) -> Hub:
    return await make_hub()


async def test_a_node_joins_and_the_hub_knows_its_identity(hub: Hub) -> None:
    node = hub.connect()
    welcome = await node.join()
    assert isinstance(welcome, Welcome)
    assert (welcome.node_id, node.session.hub_key) == (node.me.node_id, hub.identity.public_key)
    assert hub.book.joined == [
        NodeInfo(
            node_id=node.me.node_id,
            public_key=node.me.public_key,
            name="n",
            backend="torch",
            device="cpu",
            host="127.0.0.1",
            hub_host="127.0.0.1",
            swarm_port=6881,
            mesh_port=0,
            hears_totals=True,
            knows_answered=True,
            knows_session_lost=True,
        )
    ]
    assert hub.gateway.send(node.me.node_id, revoked(1)), "its session is open"


async def test_messages_keep_their_order_both_ways(hub: Hub) -> None:
    first, second = await hub.node(), await hub.node()
    for number in range(100):
        await first.say(status(number))
        assert hub.gateway.send(first.me.node_id, revoked(number))
    await second.say(LeaseReturned(lease_id=7, indices=(0,), reason="tired"))
    assert [await first.hear() for _ in range(100)] == [revoked(number) for number in range(100)]
    await hub.book.until(lambda: len(hub.book.said) == 101)
    assert [message for who, message in hub.book.said if who == first.me.node_id] == list(map(status, range(100)))
    assert [message.type for who, message in hub.book.said if who == second.me.node_id] == ["lease_returned"]


async def test_messages_of_every_size_arrive_whether_they_are_queued_or_not(hub: Hub) -> None:
    """Small messages that wait behind others are sent together, which must not change or reorder any of them."""
    node = await hub.node()
    sizes = (0, 1, 3, 100, 2_000, 4_000, 1, 100)
    sent = [Receipts(receipts=(Receipt(rollout_id="1-0", state=ReceiptState.SCORED),) * size) for size in sizes]
    for message in sent:
        assert hub.gateway.send(node.me.node_id, message)
        assert await node.hear() == message
    for message in sent[::-1] + sent:
        assert hub.gateway.send(node.me.node_id, message)
    assert [await node.hear() for _ in range(2 * len(sent))] == sent[::-1] + sent


async def test_messages_sent_at_once_are_one_write_before_the_last_message(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await hub.node()
    assert hub.gateway.send(node.me.node_id, revoked(0)) and await node.hear() == revoked(0)
    writes: list[int] = []
    transport = hub.gateway._open[node.me.node_id]._transport
    write = transport.write
    monkeypatch.setattr(transport, "write", lambda data: (writes.append(len(data)), write(data)))
    for number in (1, 2, 3):
        assert hub.gateway.send(node.me.node_id, revoked(number))
    assert [await node.hear() for _ in range(3)] == [revoked(number) for number in (1, 2, 3)]
    assert len(writes) == 1
    assert hub.gateway.send(node.me.node_id, revoked(4))
    hub.gateway.dismiss(node.me.node_id, RefusalCode.BANNED, "No.")
    assert await node.hear() == revoked(4)
    assert (await node.hear()).code == RefusalCode.BANNED


async def send_garbage(node: Node) -> None:
    await node.socket.send(b"\xc1 this is no MessagePack")


async def send_text(node: Node) -> None:
    await node.socket.send("hello")


async def send_too_much(node: Node) -> None:
    # The hub may close the connection before all bytes are sent.
    with contextlib.suppress(websockets.ConnectionClosed):
        await node.socket.send(bytes(MAX_FRAME_FROM_NODE_BYTES + 1))


async def send_out_of_turn(node: Node) -> None:
    await node.socket.send(encode(revoked(1)))


async def send_a_second_hello(node: Node) -> None:
    hello = Hello(protocol_version=1, software_version="1", node_key=node.me.public_key, nonce=bytes(32))
    await node.socket.send(encode(hello))


async def send_no_websocket(node: Node) -> None:
    node.socket.transport.write(b"\xff" * 16)


async def send_nested_lists(node: Node) -> None:
    await node.socket.send(b"\x91" * 100_000 + b"\xc0")


async def send_compressed(node: Node) -> None:
    """Send a frame that is marked as compressed (RSV1), although compression was not agreed on."""
    node.socket.transport.write(b"\xc2\x81" + bytes(4) + b"x")


HOSTILE: dict[Callable[[Node], Awaitable[None]], Fault] = {
    send_garbage: Fault.NOT_DECODABLE,
    send_text: Fault.NOT_BINARY,
    send_too_much: Fault.TOO_LARGE,
    send_out_of_turn: Fault.NOT_DECODABLE,
    send_a_second_hello: Fault.OUT_OF_TURN,
    send_no_websocket: Fault.BAD_WEBSOCKET,
    send_nested_lists: Fault.NOT_DECODABLE,
    send_compressed: Fault.BAD_WEBSOCKET,
}


@pytest.mark.parametrize("misbehave", HOSTILE)
async def test_a_protocol_error_ends_only_that_connection(
    hub: Hub, misbehave: Callable[[Node], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = await hub.node(), await hub.node()
    await misbehave(bad)
    if misbehave in (send_too_much, send_no_websocket, send_compressed):
        await bad.ended()
        assert bad.socket.close_code == (1009 if misbehave is send_too_much else 1002)
    else:
        assert (await bad.refusal()).code == RefusalCode.PROTOCOL_ERROR
    await hub.book.until(lambda: hub.book.left == [bad.me.node_id])
    await good.say(status(1))
    await hub.book.until(lambda: hub.book.said == [(good.me.node_id, status(1))])
    assert hub.gateway.send(good.me.node_id, revoked(1)) and not hub.gateway.send(bad.me.node_id, revoked(1))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert hub.gateway.turned_away["frame"] == {HOSTILE[misbehave].value: 1}


async def test_protocol_errors_delay_the_nodes_return_ever_longer(hub: Hub) -> None:
    at = hub.server.limits.now()
    hub.server.limits.now = lambda: at
    bad = hub.connect()
    for wait_s in (1, 2, 4):
        assert isinstance(await bad.join(), Welcome)
        await send_garbage(bad)
        await bad.refusal()
        bad = hub.connect(bad.me)
        answer, refused = await bad.turned_away(await bad.credentials())
        assert (answer, refused.code) == (429, RefusalCode.TOO_SOON) and f"({wait_s} s to go)" in refused.what
        at += wait_s
        bad = hub.connect(bad.me)
    assert isinstance(await bad.join(), Welcome)
    assert hub.gateway.turned_away == {"node": {"too_soon": 3}, "frame": {"not_decodable": 3}}


async def test_a_node_with_an_unreadable_message_may_return_at_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(codec, "form_of", lambda kind: MapForm({"type": None, "completion_ids": None}))
    codec.check_codec.cache_clear()
    node = await hub.node()
    await node.say(specimens.from_node()[0])
    assert "The hub failed" in (await node.refusal()).what
    assert isinstance(await hub.connect(node.me).join(), Welcome)
    assert hub.gateway.turned_away == {"node": {}, "frame": {}}
    assert "cannot read Echo's own messages" in caplog.text
    codec.check_codec.cache_clear()


async def test_a_node_that_sends_too_fast_is_read_slowly_and_loses_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "BURST_S", 0.01)
    node = await hub.node()
    for number in range(100):
        await node.say(status(number))
    await hub.book.until(lambda: len(hub.book.said) == 100)
    assert [message for _, message in hub.book.said] == list(map(status, range(100)))
    assert hub.gateway.faults[Fault.TOO_FAST] > 0


async def test_a_node_that_connects_again_replaces_its_old_connection(hub: Hub) -> None:
    old = await hub.node()
    new = hub.connect(old.me)
    assert isinstance(await new.join(), Welcome)
    assert (await old.refusal()).code == RefusalCode.ALREADY_CONNECTED
    assert [node.node_id for node in hub.book.joined] == [new.me.node_id] * 2
    assert hub.book.left == [new.me.node_id], "the hub is told once, before it is told of the new connection"
    assert hub.gateway.send(new.me.node_id, revoked(1))
    assert await new.hear() == revoked(1)
    await new.say(status(2))
    await hub.book.until(lambda: hub.book.said == [(new.me.node_id, status(2))])


async def test_a_node_that_is_dismissed_hears_why_and_the_others_stay(hub: Hub) -> None:
    bad, good = await hub.node(), await hub.node()
    hub.gateway.dismiss(bad.me.node_id, RefusalCode.BANNED, "Banned.")
    hub.gateway.dismiss("nobody", RefusalCode.BANNED, "Banned.")
    assert not hub.gateway.send(bad.me.node_id, revoked(1)), "no message follows the last one"
    refused = await bad.refusal()
    assert (refused.code, refused.what) == (RefusalCode.BANNED, "Banned.")
    await hub.book.until(lambda: hub.book.left == [bad.me.node_id])
    assert hub.gateway.send(good.me.node_id, revoked(1))


async def test_a_node_that_may_not_join_hears_why_instead_of_a_welcome(hub: Hub) -> None:
    hub.book.refusal = RefusedError("Banned.", do="Ask.", code=RefusalCode.BANNED)
    node = hub.connect()
    await node.knock()
    refused = await node.refusal()
    assert (refused.code, refused.what, refused.do) == (RefusalCode.BANNED, "Banned.", "Ask.")
    assert (hub.book.joined, hub.book.left) == ([], [])


async def test_of_two_connections_at_once_one_stays(hub: Hub) -> None:
    hub.book.may_join.clear()
    first = hub.connect()
    second = hub.connect(first.me)
    for node in (first, second):
        await node.knock()
    await hub.book.until(lambda: len(hub.book.joined) == 2)
    hub.book.may_join.set()
    # The losing connection may have received its Welcome first.
    assert isinstance(await second.hear(), Welcome)
    last = await first.hear()
    refused = last if isinstance(last, Refused) else await first.refusal()
    assert refused.code == RefusalCode.ALREADY_CONNECTED
    assert hub.gateway.send(second.me.node_id, revoked(1))
    assert await second.hear() == revoked(1)
    assert hub.book.left == []


BIG = PolicyPublished(policy_version=1, offer=OFFER.model_copy(update={"torrent": bytes(4 * 2**20)}))


async def deaf_node(hub: Hub) -> Node:
    """Return a node that has joined but reads nothing, so that messages to it fill the system's buffers."""
    deaf = hub.connect(max_queue=1, max_size=None, compression=None)
    assert isinstance(await deaf.join(), Welcome)
    return deaf


async def test_a_dead_connection_does_not_keep_its_node_waiting(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_connection, "FAREWELL_S", 0.01)
    old = await deaf_node(hub)
    for _ in range(4):
        assert hub.gateway.send(old.me.node_id, BIG)
        await asyncio.sleep(0)
    new = hub.connect(old.me)
    assert isinstance(await new.join(), Welcome)
    assert hub.book.left == [old.me.node_id]
    another = await deaf_node(hub)
    for _ in range(4):
        assert hub.gateway.send(another.me.node_id, BIG)
        await asyncio.sleep(0)
    await hub.gateway.close(RefusalCode.SHUTTING_DOWN, "The hub stops.")
    assert (await new.refusal()).code == RefusalCode.SHUTTING_DOWN
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_node_that_never_reads_is_disconnected(
    make_hub: MakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(send_queue, "MOST_MESSAGES", 4)
    hub = await make_hub()
    other = await hub.node()
    deaf = await deaf_node(hub)
    for _ in range(64):
        await asyncio.sleep(0)  # Lets the hub write as much as the system accepts.
        if not hub.gateway.send(deaf.me.node_id, BIG):
            break
    await hub.book.until(lambda: hub.book.left == [deaf.me.node_id])
    assert "does not read" in caplog.text and deaf.me.node_id in caplog.text
    assert hub.gateway.send(other.me.node_id, revoked(1))
    assert not hub.gateway.send(deaf.me.node_id, revoked(1))
    again = hub.connect(deaf.me)
    assert isinstance(await again.join(), Welcome)
    assert hub.book.left == [deaf.me.node_id]


class Pushes:
    """Pieces for one node. `useful`: numbers of the pieces that the node still needs; `made`: those that the hub has
    built.
    """

    def __init__(self, hub: Hub, node: Node) -> None:
        self.useful = set(range(64))
        self.made: list[int] = []
        self._gateway = hub.gateway
        self._node_id = node.me.node_id

    def push(self, number: int, rank: Rank = (0, False)) -> bool:
        return self._gateway.push(self._node_id, SimpleNamespace(build=partial(self._build, number)), rank)

    async def fill(self) -> None:
        """Let the hub write until the system accepts no more."""
        idle_turns, made = 0, 0
        while idle_turns < 100:
            await asyncio.sleep(0)
            idle_turns = idle_turns + 1 if len(self.made) == made else 0
            made = len(self.made)

    def _build(self, number: int) -> Piece | None:
        self.made.append(number)
        return Piece(info_hash=bytes(20), index=number, data=bytes(2**18)) if number in self.useful else None


async def clogged_node(hub: Hub) -> tuple[Node, Pushes]:
    """Return a node that does not read, and whose further pieces therefore wait in the hub."""
    node = await deaf_node(hub)
    pushes = Pushes(hub, node)
    assert all(pushes.push(number) for number in range(64))
    await pushes.fill()
    return node, pushes


async def test_pushes_yield_to_messages_and_useless_ones_are_skipped(hub: Hub) -> None:
    node = await deaf_node(hub)
    pushes = Pushes(hub, node)
    assert all(pushes.push(number, (0, number < 60)) for number in range(64))
    await pushes.fill()
    made = pushes.made.copy()
    assert made[:4] == [60, 61, 62, 63] and len(made) < 60  # Pieces with the lowest rank are sent first.
    pushes.useful.clear()
    assert hub.gateway.send(node.me.node_id, revoked(7))
    messages = [await node.hear() for _ in range(len(made) + 1)]
    assert [piece.index for piece in messages[:-1] if isinstance(piece, Piece)] == made
    assert messages[-1] == revoked(7)
    assert hub.gateway.send(node.me.node_id, revoked(8)) and await node.hear() == revoked(8)
    assert not hub.gateway.push("nobody", SimpleNamespace(build=lambda: None), (0, False))


async def test_a_node_is_heard_while_pieces_wait_for_it(hub: Hub) -> None:
    node, _pushes = await clogged_node(hub)
    await node.socket.ping()  # The pong to this ping waits behind the pieces.
    await node.say(status(3))
    await hub.book.until(lambda: (node.me.node_id, status(3)) in hub.book.said)


@pytest.mark.parametrize("talks", [False, True])
async def test_the_last_message_follows_the_one_in_transit(hub: Hub, talks: bool) -> None:
    node, pushes = await clogged_node(hub)
    hub.gateway.dismiss(node.me.node_id, RefusalCode.BANNED, "Its operator has banned it.")
    assert not pushes.push(1)
    if talks:
        await node.say(status(1))
        await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    messages = [await node.hear() for _ in range(len(pushes.made) + 1)]
    assert isinstance(messages[-1], Refused) and messages[-1].code == RefusalCode.BANNED
    await node.ended()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])


async def test_a_node_that_says_goodbye_and_reads_nothing_is_disconnected(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_connection, "FAREWELL_S", 0.01)
    node, _pushes = await clogged_node(hub)
    await node.say(Goodbye(reason="its owner plays a game"))
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name().startswith("write to")))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_node_that_takes_no_pushes_is_disconnected(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(send_queue, "MOST_PUSHES", 64)
    deaf = await deaf_node(hub)
    pushes = Pushes(hub, deaf)
    assert [pushes.push(number) for number in range(65)] == [True] * 64 + [False]
    await hub.book.until(lambda: hub.book.left == [deaf.me.node_id])
    assert "does not read" in caplog.text


async def test_a_push_that_cannot_be_made_ends_the_connection_aloud(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    node = await hub.node()

    def fail() -> FromHub | None:
        raise MemoryError("no memory")

    assert hub.gateway.push(node.me.node_id, SimpleNamespace(build=fail), (0, False))
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert "nothing more can be sent" in caplog.text and "no memory" in caplog.text


async def test_a_node_that_falls_silent_is_told_and_forgotten(make_hub: MakeHub) -> None:
    hub = await make_hub(heartbeat_s=0.02)
    node = await hub.node()
    refused = await node.refusal()
    assert refused.code == RefusalCode.PROTOCOL_ERROR
    assert "silent" in refused.what and refused.do
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])


async def test_a_node_says_goodbye(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "echo_hub")
    node = await hub.node()
    await node.say(Goodbye(reason="its owner plays a game"))
    await node.ended()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert (node.socket.close_code, hub.book.said) == (1000, [])
    assert not hub.gateway.send(node.me.node_id, revoked(1))
    assert "its owner plays a game" in caplog.text


async def test_a_goodbye_forges_no_line_of_the_log(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "echo_hub")
    node = await hub.node()
    await node.say(Goodbye(reason="bye\nERROR the disk is full\u202e"))
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert next(message for message in caplog.messages if "bye" in message).isprintable()


async def test_sending_to_a_node_that_leaves_is_harmless(hub: Hub) -> None:
    node = await hub.node()
    await node.say(Goodbye())
    for _ in range(10_000):
        if not hub.gateway.send(node.me.node_id, revoked(1)):
            break
        await asyncio.sleep(0)
    else:
        pytest.fail("the node never left")
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])


async def test_a_peers_text_is_truncated_before_it_is_logged(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "echo_hub")
    node = await hub.node()
    await node.socket.send(msgpack.packb({"type": "\x1b[2J" + "x" * 100_000}))
    assert (await node.refusal()).code == RefusalCode.PROTOCOL_ERROR
    assert "\x1b" not in caplog.text
    assert len(caplog.text) < 2_000


@pytest.mark.parametrize("abruptly", [False, True])
async def test_a_connection_that_is_gone_is_forgotten(
    hub: Hub, abruptly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    node = await hub.node()
    if abruptly:
        node.socket.transport.abort()
    else:
        await node.socket.close()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert not hub.gateway.send(node.me.node_id, revoked(1))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_node_that_is_gone_before_its_welcome_is_forgotten(hub: Hub) -> None:
    hub.book.may_join.clear()
    node = hub.connect()
    await node.knock()
    await hub.book.until(lambda: len(hub.book.joined) == 1)
    node.socket.transport.abort()
    await node.ended()
    hub.book.may_join.set()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert not hub.gateway.send(node.me.node_id, revoked(1))


async def test_a_hub_that_stops_tells_every_node(hub: Hub) -> None:
    nodes = [await hub.node() for _ in range(3)]
    hub.book.may_join.clear()
    newcomer = hub.connect()
    await newcomer.knock()
    await hub.book.until(lambda: len(hub.book.joined) == 4)
    await hub.gateway.close(RefusalCode.SHUTTING_DOWN, "The hub stops.")
    for node in nodes:
        refused = await node.refusal()
        assert (refused.code, refused.what) == (RefusalCode.SHUTTING_DOWN, "The hub stops.")
    assert (await newcomer.refusal()).code == RefusalCode.SHUTTING_DOWN
    hub.book.may_join.set()
    await hub.book.until(lambda: sorted(hub.book.left) == sorted(node.me.node_id for node in (*nodes, newcomer)))


async def test_a_message_to_an_unknown_node_is_not_sent(hub: Hub) -> None:
    assert not hub.gateway.send("0" * 20, revoked(1))
    hub.book.may_join.clear()
    newcomer = hub.connect()
    await newcomer.knock()
    await hub.book.until(lambda: len(hub.book.joined) == 1)
    assert not hub.gateway.send(newcomer.me.node_id, revoked(1)), "it has no Welcome yet"
    hub.book.may_join.set()


@pytest.mark.parametrize("failure", [KeyError("a bug"), StorageError("The disk is full.", got="/srv/run/echo.db")])
async def test_the_hubs_own_error_ends_the_connection_and_is_logged(
    hub: Hub, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    node, other = await hub.node(), await hub.node()
    hub.book.failure = failure
    await node.say(status(1))
    refused = await node.refusal()
    assert "The hub failed" in refused.what and refused.do
    assert "echo.db" not in refused.what, "a stranger learns nothing of the hub's internals"
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info is not None and record.exc_info[1] is failure
    hub.book.failure = None
    await other.say(status(2))
    await hub.book.until(lambda: hub.book.said == [(other.me.node_id, status(2))])
