"""Hub, gateways (which hold the nodes' connections) and message broker together: the death of any one loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.broker import lacking
from echo_hub.gateways import fleet, hub_line, uplink
from echo_hub.gateways.broker import Broker
from echo_hub.gateways.items import AROUND_BYTES
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.subjects import Subjects
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.invitations import hash_of
from echo_shared.records.run import Invite
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import Piece, RefusalCode, Rollout, Welcome
from tests.echo_hub.gateways.world import RUN_ID, World, hear_receipts, rollout, worlds
from tests.echo_hub.net.gateway_parts import DEADLINE_S, Book, revoked, status

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with worlds(tmp_path) as made:
        yield made


def rollouts_of(book: Book) -> list[str]:
    return [message.rollout_id for _, message in book.said if isinstance(message, Rollout)]


async def test_a_node_joins_by_a_gateway_and_all_goes_both_ways_in_order(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
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
    assert node.session.hub_key == world.me.public_key, "the gateway speaks for the hub"
    for number in range(50):
        await node.say(rollout(number))
        await node.say(status(number))
        assert hub.connections.send(node.me.node_id, revoked(number))
    piece = Piece(info_hash=bytes(20), index=0, data=b"x" * 1000)
    assert hub.connections.push(node.me.node_id, SimpleNamespace(build=lambda: piece), (0, False))
    heard = [await node.hear() for _ in range(51)]
    said = [one for one in heard if one.type != "receipts"]
    while len(said) < 51:
        one = await node.hear()
        said += [one] if one.type != "receipts" else []
    assert [one for one in said if one.type == "lease_revoked"] == [revoked(number) for number in range(50)]
    assert piece in said
    await hub.book.until(lambda: len(hub.book.said) == 100)
    assert [message.type for _, message in hub.book.said] == ["rollout", "node_status"] * 50
    first = hub.book.said[0][1]
    assert isinstance(first, Rollout) and first.rollout_id == "1-0"
    assert first.completion_ids.tolist() == [0, 1, 2] and first.behavior_logprobs.tolist() == [-1.0] * 3
    await node.socket.close()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert not hub.connections.send(node.me.node_id, revoked(1))


async def test_gateways_treat_an_ended_invite_as_the_hubs_own_port_does(world: World) -> None:
    """Open runs ignore an ended invite. Runs by invitation refuse it without counting it as a wrong guess, because
    nodes that guess must wait.
    """
    hub = await world.hub()
    hub.book.invitations.renew(
        [Invite(invite_id=1, name="Ada", token_hash=hash_of("ended"), max_keys=1, created_at=0.0, expires_at=1.0)]
    )
    is_open = await world.gateway(hub)
    by_invitation = await world.gateway(hub, join="invite")
    node = world.node(is_open.url)
    await node.knock(await node.credentials(token="ended"))
    assert isinstance(await node.hear(), Welcome)
    for _ in range(3):
        node = world.node(by_invitation.url)
        answer, refused = await node.turned_away(await node.credentials(token="ended"))
        assert (answer, refused.code) == (403, RefusalCode.BAD_TOKEN)
        assert "invite for Ada expired on" in refused.what


async def test_received_rollouts_survive_the_death_of_hub_and_gateway(world: World) -> None:
    """Nodes with receipts do not send their rollouts again, so the next hub must get every rollout, in order."""
    hub = await world.hub()
    hub.may_commit.clear()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    for number in range(20):
        await node.say(rollout(number))
    assert await hear_receipts(node, 20) == [f"1-{number}" for number in range(20)]
    await hub.book.until(lambda: len(rollouts_of(hub.book)) == 20)
    await hub.kill()
    for number in range(20, 30):  # While no hub is running, the gateway keeps its nodes and gives receipts.
        await node.say(rollout(number))
    assert await hear_receipts(node, 10) == [f"1-{number}" for number in range(20, 30)]
    await gateway.stop()
    again = await world.hub()
    await again.book.until(lambda: len(rollouts_of(again.book)) >= 30)
    assert rollouts_of(again.book) == [f"1-{number}" for number in range(30)]
    assert {who for who, _ in again.book.said} == {node.me.node_id}


async def test_a_killed_broker_keeps_stored_messages_and_the_rest_is_resent(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    hub.may_commit.clear()
    await node.say(rollout(0))
    await hear_receipts(node, 1)
    world.broker.kill()
    await node.say(rollout(1))
    world.broker.start()
    assert await hear_receipts(node, 1) == ["1-1"]
    await hub.book.until(lambda: rollouts_of(hub.book)[-1:] == ["1-1"])
    assert set(rollouts_of(hub.book)) == {"1-0", "1-1"}


async def test_nodes_of_another_hub_process_connect_again(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    await hub.kill()
    again = await world.hub()
    assert (await node.refusal()).code == RefusalCode.SHUTTING_DOWN
    await world.joined(gateway.url, node.me)
    assert [info.node_id for info in again.book.joined] == [node.me.node_id]


async def test_after_a_lost_message_nodes_reconnect_and_get_their_state_again(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    (line,) = hub.connections.sessions.lines.values()
    line.sent += 1  # Makes the sequence numbers skip one, as if the broker had lost a message.
    assert hub.connections.send(node.me.node_id, revoked(1))
    assert (await node.refusal()).code == RefusalCode.SHUTTING_DOWN
    again = await world.joined(gateway.url, node.me)
    assert hub.connections.send(node.me.node_id, revoked(2))
    assert await again.hear() == revoked(2)
    assert list(hub.connections.sessions.lines.values()) != [line]


async def test_a_silent_gateway_and_its_nodes_are_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GONE_S", 0.5)
    monkeypatch.setattr(fleet, "HERE_S", 0.05)
    monkeypatch.setattr(hub_line, "HERE_S", 0.05)
    hub = await world.hub()
    gateway, other = await world.gateway(hub), await world.gateway(hub)
    node, stays = await world.joined(gateway.url), await world.joined(other.url)
    await gateway.fall_silent()
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    assert not hub.connections.send(node.me.node_id, revoked(1))
    assert hub.connections.send(stays.me.node_id, revoked(2))
    assert await stays.hear() == revoked(2)


async def test_a_hub_whose_clock_was_set_back_is_recognized(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_line, "GONE_S", 0.2)
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    await hub.kill()
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    await world.hub()
    assert (await node.refusal()).code == RefusalCode.SHUTTING_DOWN
    monkeypatch.setattr(hub_line, "GONE_S", 5.0)
    await world.joined(gateway.url, node.me)


async def test_nodes_are_not_read_while_the_broker_is_down(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the broker is down, a gateway must stop reading from its nodes, or its memory would grow without bound."""
    monkeypatch.setattr(uplink, "WAITING_BYTES", 10 * AROUND_BYTES)
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    world.broker.kill()
    for number in range(100):
        await node.say(rollout(number))
    world.broker.start()
    assert await hear_receipts(node, 100) == [f"1-{number}" for number in range(100)]


async def test_a_node_is_connected_to_one_gateway_at_a_time(world: World) -> None:
    hub = await world.hub()
    one, other = await world.gateway(hub), await world.gateway(hub)
    me = Identity.generate()
    first = await world.joined(one.url, me)
    second = await world.joined(other.url, me)
    assert (await first.refusal()).code == RefusalCode.ALREADY_CONNECTED
    third = await world.joined(hub.server.url, me)
    assert (await second.refusal()).code == RefusalCode.ALREADY_CONNECTED
    fourth = await world.joined(one.url, me)
    assert (await third.refusal()).code == RefusalCode.ALREADY_CONNECTED
    assert hub.connections.send(me.node_id, revoked(4))
    assert await fourth.hear() == revoked(4)
    assert hub.book.left == [me.node_id] * 3


async def test_a_node_dismissed_by_the_hub_gets_the_reason(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    hub.connections.dismiss(node.me.node_id, RefusalCode.BANNED, "No more.")
    refused = await node.refusal()
    assert (refused.code, refused.what) == (RefusalCode.BANNED, "No more.")
    await hub.book.until(lambda: hub.book.left == [node.me.node_id])
    hub.book.barred.add(node.me.node_id)
    again = world.node(gateway.url, node.me)
    http_status, refusal = await again.turned_away(await again.credentials())
    assert (http_status, refusal.code) == (403, RefusalCode.BANNED)


async def test_a_proof_opens_one_connection_at_any_gateway(world: World) -> None:
    hub = await world.hub()
    one, other = await world.gateway(hub), await world.gateway(hub)
    node = world.node(one.url)
    credentials = await node.credentials()
    elsewhere = world.node(other.url, node.me)
    await elsewhere.knock(credentials)
    assert (await node.turned_away(credentials))[1].code == RefusalCode.STALE_PROOF
    own_port = world.node(hub.server.url, node.me)
    assert (await own_port.turned_away(credentials))[1].code == RefusalCode.STALE_PROOF


async def test_a_protocol_error_ends_only_the_nodes_own_connection(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    good, bad = await world.joined(gateway.url), await world.joined(gateway.url)
    await bad.socket.send(b"\xc1 this is no MessagePack")
    assert (await bad.refusal()).code == RefusalCode.PROTOCOL_ERROR
    await hub.book.until(lambda: hub.book.left == [bad.me.node_id])
    await good.say(rollout(0))
    assert await hear_receipts(good, 1) == ["1-0"]


async def test_a_stranger_at_the_broker_cannot_speak_for_a_node(world: World) -> None:
    hub = await world.hub()
    gateway = await world.gateway(hub)
    node = await world.joined(gateway.url)
    subjects, stranger = Subjects(RUN_ID), Seal(Identity.generate())
    broker = await Broker.open(world.config().gateways, name="stranger")
    forged = stranger.close(subjects.sent, ["gateway", 1, [[0, node.me.node_id, 0, encode(rollout(1)), "1-1"]]])
    await broker.store(subjects.sent, forged, message_id="forged")
    await broker.publish(subjects.asked, stranger.close(subjects.asked, ["g", 0, 1, [3]]))
    (line,) = hub.connections.sessions.lines
    await broker.publish(subjects.told(line), b"nothing that is sealed")
    await node.say(rollout(0))
    await hub.book.until(lambda: rollouts_of(hub.book) == ["1-0"])
    assert hub.connections.send(node.me.node_id, revoked(1))
    assert revoked(1) in [await node.hear(), await node.hear()]
    async with asyncio.timeout(DEADLINE_S):
        while await broker.waiting(subjects.stream):
            continue
    await broker.close()
