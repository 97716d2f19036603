"""A real hub opens a websocket only for a node with a valid proof of its key and the right to join; any other client
gets an HTTP answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from websockets.exceptions import InvalidStatus

from echo_hub.net import door, nonces
from echo_hub.net.invitations import hash_of
from echo_shared.errors import RefusedError
from echo_shared.records.run import Invite
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import decode_from_hub, encode
from echo_shared.wire.credentials import Credentials
from echo_shared.wire.messages import PROTOCOL_VERSION, Hello, RefusalCode, Refused, Welcome
from tests.echo_hub.net.gateway_parts import Hub, MakeHub, hubs, status


@pytest.fixture
async def make_hub() -> AsyncIterator[MakeHub]:
    async with hubs() as make:
        yield make


@pytest.fixture
async def hub(make_hub: MakeHub) -> Hub:
    return await make_hub()


def hello(version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(
        protocol_version=version,
        software_version="0.0.1",
        node_key=Identity.generate().public_key,
        nonce=bytes(32),
    )


async def asked(hub: Hub, **headers: str) -> tuple[int, Any, bytes]:
    async with aiohttp.ClientSession() as http, http.get(f"{hub.server.url}/node", headers=headers) as answer:
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize("length", [9, 256])
async def test_any_invite_token_lets_a_node_in(make_hub: MakeHub, length: int) -> None:
    token = "ü" * length
    hub = await make_hub(join="invite", invite_tokens=("another-token", token))
    node = hub.connect()
    await node.knock(await node.credentials(token=token))
    assert isinstance(await node.hear(), Welcome)


@pytest.mark.parametrize(("token", "got"), [(None, "no token"), ("", "does not know"), ("a-token ", "does not know")])
async def test_without_the_right_token_a_node_is_refused(make_hub: MakeHub, token: str | None, got: str) -> None:
    hub = await make_hub(join="invite", invite_tokens=("a-token-1",))
    node = hub.connect()
    answer, refused = await node.turned_away(await node.credentials(token=token))
    assert (answer, refused.code) == (403, RefusalCode.BAD_TOKEN)
    assert got in refused.what and "--token" in refused.do
    assert (hub.book.joined, hub.book.left) == ([], [])


async def test_an_invite_admits_its_number_of_keys_until_it_is_revoked(make_hub: MakeHub) -> None:
    hub = await make_hub(join="invite", invite_tokens=("the-token-of-all",))
    invite = Invite(
        invite_id=1, name="Ada", token_hash=hash_of("ada's token"), max_keys=1, created_at=0.0, expires_at=9e9
    )
    hub.book.invitations.renew([invite])

    async def comes(me: Identity | None = None, token: str | None = "ada's token") -> None:
        node = hub.connect(me)
        await node.knock(await node.credentials(token=token))
        assert isinstance(await node.hear(), Welcome)

    async def refused(me: Identity | None = None) -> Refused:
        node = hub.connect(me)
        answer, said = await node.turned_away(await node.credentials(token="ada's token"))
        assert (answer, said.code) == (403, RefusalCode.BAD_TOKEN) and "echo-node join URL --token" in said.do
        return said

    ada = Identity.generate()
    await comes(ada)
    for _ in range(3):
        assert "invite for Ada is used up: 1 key" in (await refused()).what, (
            "a used-up invite is not a wrong guess, which would be delayed"
        )
    await comes(ada)
    hub.book.invitations.renew([replace(invite, expires_at=1.0, max_keys=9)])
    assert "invite for Ada expired on" in (await refused()).what
    await comes(ada, token=None)
    hub.book.invitations.renew([replace(invite, revoked_at=1.0)])
    assert "invite for Ada has been revoked" in (await refused(ada)).what
    await comes(ada, token="the-token-of-all")
    assert [node.invite_id for node in hub.book.joined] == [1, 1, 1, None]
    assert hub.gateway.turned_away["node"] == {"bad_token": 5}


async def test_an_invite_for_one_key_admits_one_of_two_simultaneous_keys(make_hub: MakeHub) -> None:
    hub = await make_hub(join="invite")
    hub.book.invitations.renew(
        [Invite(invite_id=1, name="Ada", token_hash=hash_of("t"), max_keys=1, created_at=0.0, expires_at=9e9)]
    )
    first, second = hub.connect(), hub.connect()
    passes = [await node.credentials(token="t") for node in (first, second)]
    await asyncio.gather(first.knock(passes[0]), second.knock(passes[1]), return_exceptions=True)
    assert len(hub.book.joined) == 1


async def test_an_open_hub_admits_nodes_whose_invite_has_ended(hub: Hub) -> None:
    hub.book.invitations.renew(
        Invite(invite_id=number, name="Ada", token_hash=hash_of(token), max_keys=1, created_at=0.0, expires_at=until)
        for number, token, until in ((1, "good", 9e9), (2, "ended", 1.0))
    )
    for token in ("good", "ended"):
        node = hub.connect()
        await node.knock(await node.credentials(token=token))
        assert isinstance(await node.hear(), Welcome)
    assert [node.invite_id for node in hub.book.joined] == [1, None]


async def test_invited_nodes_have_places_that_new_keys_cannot_take(make_hub: MakeHub) -> None:
    hub = await make_hub(max_connections=16)
    hub.book.invitations.renew(
        [Invite(invite_id=1, name="Ada", token_hash=hash_of("t"), max_keys=1, created_at=0.0, expires_at=9e9)]
    )
    for _ in range(12):
        await hub.node()
    late = hub.connect()
    assert (await late.turned_away(await late.credentials()))[1].code == RefusalCode.TOO_SOON
    ada = hub.connect()
    await ada.knock(await ada.credentials(token="t"))
    assert isinstance(await ada.hear(), Welcome)
    useful = hub.connect()
    hub.book.known.add(useful.me.node_id)
    assert isinstance(await useful.join(), Welcome)


async def test_an_open_hub_does_not_look_at_tokens(hub: Hub) -> None:
    node = hub.connect()
    await node.knock(await node.credentials(token="whatever"))
    assert isinstance(await node.hear(), Welcome)


async def test_another_protocol_version_is_refused_and_told_which_side_must_upgrade(hub: Hub) -> None:
    for version, who in ((1, "Upgrade the node"), (99, "Ask the hub's operator")):
        answer, refused = await hub.connect().turned_away(Credentials(hello=encode(hello(version))))
        assert (answer, refused.code) == (426, RefusalCode.PROTOCOL_VERSION)
        assert who in refused.do


async def test_an_upgrade_without_credentials_is_told_to_upgrade_its_software(hub: Hub) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for headers in ({}, upgrade, {**upgrade, "Authorization": "Basic YTpi"}):
        answer, said, body = await asked(hub, **headers)
        assert (answer, said["Upgrade"]) == (426, "websocket")
        assert b"older than the hub" in body


async def test_a_node_that_cannot_prove_its_key_is_refused(hub: Hub) -> None:
    thief = hub.connect()
    said = thief.session.hello()
    challenge = await thief.challenged(said)
    thief.session._me = Identity.generate()
    proof = thief.session.proof(name="n", invite_token=None, backend="torch", device="d", swarm_port=0)
    answer, refused = await thief.turned_away(Credentials(hello=said, nonce=challenge.nonce, proof=proof))
    assert (answer, refused.code) == (403, RefusalCode.BAD_SIGNATURE)
    assert hub.book.joined == []


async def test_a_recorded_upgrade_opens_nothing(hub: Hub) -> None:
    node = hub.connect()
    recorded = await node.credentials()
    await node.knock(recorded)
    assert isinstance(await node.hear(), Welcome)
    answer, refused = await hub.connect(node.me).turned_away(recorded)
    assert (answer, refused.code) == (403, RefusalCode.STALE_PROOF)
    await node.say(status(1))
    await hub.book.until(lambda: hub.book.said == [(node.me.node_id, status(1))])
    assert len(hub.book.joined) == 1 and hub.book.left == [], "the connected node is not disturbed"


async def test_a_proof_that_comes_late_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonces, "VALID_S", 0.0)
    late = hub.connect()
    answer, refused = await late.turned_away(await late.credentials())
    assert (answer, refused.code) == (403, RefusalCode.STALE_PROOF)


async def test_challenges_of_another_hub_and_invented_ones_are_refused(make_hub: MakeHub) -> None:
    first, second = await make_hub(), await make_hub()
    node = first.connect()
    mine = await node.credentials()
    for credentials in (mine, Credentials(hello=mine.hello, nonce=bytes(32), proof=mine.proof)):
        answer, refused = await second.connect(node.me).turned_away(credentials)
        assert (answer, refused.code) == (403, RefusalCode.STALE_PROOF)


async def test_a_barred_node_is_told_before_it_has_a_websocket(hub: Hub) -> None:
    node = hub.connect()
    hub.book.barred.add(node.me.node_id)
    answer, refused = await node.turned_away(await node.credentials())
    assert (answer, refused.what, refused.do, refused.code) == (403, "Banned.", "Ask.", RefusalCode.BANNED)
    assert (hub.book.joined, hub.book.left) == ([], [])


async def test_a_node_barred_meanwhile_gets_the_reason_instead_of_a_welcome(hub: Hub) -> None:
    hub.book.refusal = RefusedError("Banned.", do="Ask.", code=RefusalCode.BANNED)
    node = hub.connect()
    await node.knock()
    refused = await node.refusal()
    assert (refused.code, refused.what, refused.do) == (RefusalCode.BANNED, "Banned.", "Ask.")


@pytest.mark.parametrize(
    "credentials",
    [
        Credentials(hello=b"\xc1 this is no MessagePack"),
        Credentials(hello=encode(status(1))),
        Credentials(hello=encode(hello()), nonce=b"short", proof=b"x"),
        Credentials(hello=encode(hello()), nonce=bytes(32)),
        Credentials(hello=encode(hello()), nonce=bytes(32), proof=bytes(5_800)),
    ],
)
async def test_broken_credentials_are_an_error_of_the_node(hub: Hub, credentials: Credentials) -> None:
    answer, said, body = await asked(hub, Authorization=credentials.header())
    refused = decode_from_hub(body)
    assert isinstance(refused, Refused) and said["Content-Type"].startswith("application/")
    assert (answer, refused.code) in ((400, RefusalCode.PROTOCOL_ERROR), (403, RefusalCode.STALE_PROOF))
    assert hub.book.joined == []


async def test_work_in_place_of_the_proof_is_out_of_turn(hub: Hub) -> None:
    eager = hub.connect()
    said = eager.session.hello()
    challenge = await eager.challenged(said)
    credentials = Credentials(hello=said, nonce=challenge.nonce, proof=encode(status(100)))
    answer, refused = await eager.turned_away(credentials)
    assert (answer, refused.code) == (400, RefusalCode.PROTOCOL_ERROR)
    assert "node_status in state challenged" in refused.what
    assert (hub.book.joined, hub.book.said) == ([], [])


@pytest.mark.parametrize("origin", ["https://evil.example", "null", ""])
async def test_a_web_page_opens_no_connection(hub: Hub, origin: str) -> None:
    node = hub.connect(origin=origin)
    credentials = await (honest := hub.connect(node.me)).credentials()
    with pytest.raises(InvalidStatus) as caught:
        await node.knock(credentials)
    assert caught.value.response.status_code == 403 and hub.book.joined == []
    await honest.knock(credentials)
    assert isinstance(await honest.hear(), Welcome), "the page's attempt did not use up the credentials"


async def test_proven_credentials_on_a_plain_request_are_no_websocket(hub: Hub) -> None:
    node = hub.connect()
    credentials = await node.credentials()
    answer, _, _ = await asked(hub, Authorization=credentials.header())
    assert answer == 400 and hub.book.joined == []


async def test_guessing_tokens_delays_the_guesser_and_no_working_node(make_hub: MakeHub) -> None:
    hub = await make_hub(join="invite", invite_tokens=("the-token",), trusted_proxies=("127.0.0.1",))
    hub.server.limits.now = lambda: 1_000.0
    here = {"X-Forwarded-For": "192.0.2.1"}
    good = hub.connect(headers=here)
    await good.knock(await good.credentials(token="the-token"))
    assert isinstance(await good.hear(), Welcome)
    await good.say(status(1))
    await hub.book.until(lambda: hub.book.said != [])
    guesses = []
    for number in range(3):
        guesser = hub.connect(headers=here)
        guesses.append(await guesser.turned_away(await guesser.credentials(token=f"guess-{number}")))
    assert [(answer, refused.code) for answer, refused in guesses] == [
        (403, RefusalCode.BAD_TOKEN),
        (429, RefusalCode.TOO_SOON),
        (429, RefusalCode.TOO_SOON),
    ]
    elsewhere = hub.connect(headers={"X-Forwarded-For": "192.0.2.2"})
    await elsewhere.knock(await elsewhere.credentials(token="the-token"))
    again = hub.connect(good.me, headers=here)
    await again.knock(await again.credentials(token="the-token"))
    assert isinstance(await again.hear(), Welcome)
    assert hub.gateway.turned_away["node"] == {"bad_token": 1, "too_soon": 2}


async def test_nodes_wait_for_their_turn_or_are_told_when_to_come(
    make_hub: MakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins per second are limited. A node whose turn comes too late for waiting is told when to come again."""
    monkeypatch.setattr(door, "MOST_WAITING", 0)
    hub = await make_hub(joins_per_s=0.01)
    await hub.node()
    with pytest.raises(InvalidStatus) as caught:
        await hub.connect().knock()
    response = caught.value.response
    assert (response.status_code, response.headers["Retry-After"]) == (429, "0")
    assert hub.gateway.turned_away["node"] == {"too_soon": 1}
    monkeypatch.setattr(door, "TURN_S", 0.0)
    late = hub.connect()
    assert (await late.turned_away(await late.credentials()))[1].code == RefusalCode.TOO_SOON
    assert len(hub.book.joined) == 1
