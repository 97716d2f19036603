"""Nodes can read the hub's records of their own work by HTTP, with a proof of their key, but no records of other
nodes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net import own_books
from echo_hub.net.gateway import Gateway
from echo_hub.net.own_books import OwnBooks
from echo_hub.net.server import Server
from echo_shared.errors import RefusedError
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import decode_from_hub, encode
from echo_shared.wire.credentials import (
    BOOKS_CERTIFICATE,
    BOOKS_FLEET,
    BOOKS_RECEIPTS,
    BOOKS_TEAM,
    MOST_RECEIPTS,
    Credentials,
    challenge_of,
)
from echo_shared.wire.messages import (
    Challenge,
    Fleet,
    FleetWanted,
    Goodbye,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    RefusalCode,
    Refused,
    Team,
    TeamWanted,
)
from echo_shared.wire.sessions import NodeSession
from tests.echo_hub.net.gateway_parts import Book
from tests.echo_shared.wire.messages.examples import FLEET_WANTED

WANTED = encode(ReceiptsWanted(rollout_ids=("1-0", "1-1")))


class Asked:
    """Stand-in for the hub's records; keeps the requests to them."""

    def __init__(self) -> None:
        self.me = Identity.generate()
        self.book = Book()
        self.asked: list[tuple[str, Sequence[str]]] = []
        self.known: set[str] = set()
        self.url = ""
        self.now = 0.0

    async def receipts(self, node_id: str, rollout_ids: Sequence[str]) -> list[Receipt]:
        self.asked.append((node_id, tuple(rollout_ids)))
        return [Receipt(rollout_id=one, state=ReceiptState.TRAINED) for one in rollout_ids]

    async def certificate(self, node_id: str) -> bytes | None:
        return f'{{"of": "{node_id}"}}'.encode() if node_id in self.known else None

    async def change_team(self, node_id: str, wanted: TeamWanted) -> Team:
        if wanted.name == "no":
            raise RefusedError("There is no team of this name.", got=wanted.name)
        return Team(name=f"{wanted.action} {wanted.name}", members=1)

    async def fleet(self, node_id: str, wanted: FleetWanted) -> Fleet:
        return Fleet(counts_once=bool(wanted.counts_once))

    async def answer(
        self, path: str, body: bytes | None, *, me: Identity, token: str | None = None
    ) -> tuple[int, bytes]:
        """Send the request twice, first without and then with the node's proof; return the second status and body."""
        session = NodeSession(me=me, pinned_hub_key=self.me.public_key, software_version="1", nonce=bytes(32))
        hello = session.hello()
        status, headers, _ = await self.once(path, b"", Credentials(hello=hello))
        frame = challenge_of(headers["WWW-Authenticate"])
        assert status == 401 and frame is not None
        challenge = session.receive(frame)
        assert isinstance(challenge, Challenge)
        proof = session.proof(name="n", invite_token=token, backend="none", device="none", swarm_port=0)
        status, _, said = await self.once(path, body, Credentials(hello=hello, nonce=challenge.nonce, proof=proof))
        return status, said

    async def once(self, path: str, body: bytes | None, credentials: Credentials | None) -> tuple[int, Any, bytes]:
        headers = {} if credentials is None else {"Authorization": credentials.header()}
        method = "GET" if path == BOOKS_CERTIFICATE else "POST"
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, f"{self.url}{path}", data=body, headers=headers) as answer,
        ):
            return answer.status, answer.headers, await answer.read()

    async def refused(self, path: str, body: bytes | None, **options: object) -> tuple[int, Refused]:
        status, said = await self.answer(path, body, **options)  # type: ignore[arg-type]
        message = decode_from_hub(said)
        assert isinstance(message, Refused)
        return status, message


@pytest.fixture
async def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asked]:
    asked = Asked()
    config = ServerConfig.model_validate({"port": 0, **getattr(request, "param", {})})
    server = Server(config)
    gateway = Gateway(me=asked.me, settings=config, limits=server.limits)
    monkeypatch.setattr(own_books, "time", SimpleNamespace(monotonic=lambda: asked.now))
    books = OwnBooks(gateway, asked)
    await server.open([*gateway.routes(asked.book), *books.routes(asked.book)])
    asked.url = server.url
    yield asked
    await server.close()


async def test_a_node_reads_its_own_rollouts(hub: Asked) -> None:
    me = Identity.generate()
    status, said = await hub.answer(BOOKS_RECEIPTS, WANTED, me=me)
    answer = decode_from_hub(said)
    assert status == 200 and isinstance(answer, Receipts)
    assert [receipt.rollout_id for receipt in answer.receipts] == ["1-0", "1-1"]
    assert hub.asked == [(me.node_id, ("1-0", "1-1"))] and hub.book.joined == []


async def test_a_node_asks_for_its_owner_s_fleet(hub: Asked) -> None:
    me = Identity.generate()
    status, said = await hub.answer(BOOKS_FLEET, encode(FLEET_WANTED), me=me)
    assert (status, decode_from_hub(said)) == (200, Fleet(counts_once=True))
    status, refused = await hub.refused(BOOKS_FLEET, WANTED, me=me)
    assert status >= 400 and "wrong message type" in refused.what


async def test_a_node_changes_its_team(hub: Asked) -> None:
    me = Identity.generate()
    status, said = await hub.answer(BOOKS_TEAM, encode(TeamWanted(action="join", name="\u202eX\n")), me=me)
    assert (status, decode_from_hub(said)) == (200, Team(name="join ?X?", members=1))
    status, refused = await hub.refused(BOOKS_TEAM, encode(TeamWanted(action="join", name="no")), me=me)
    assert status >= 400 and "no team" in refused.what
    hub.now += 10.0
    _, refused = await hub.refused(BOOKS_TEAM, WANTED, me=me)
    assert "wrong message type" in refused.what
    hub.now += 10.0
    _, refused = await hub.refused(BOOKS_TEAM, b"\xc1" * 80_000, me=me)
    assert "too many" in refused.what


async def test_a_certificate_is_the_asking_node_s(hub: Asked) -> None:
    me, stranger = Identity.generate(), Identity.generate()
    hub.known.add(me.node_id)
    assert await hub.answer(BOOKS_CERTIFICATE, None, me=me) == (200, f'{{"of": "{me.node_id}"}}'.encode())
    status, refused = await hub.refused(BOOKS_CERTIFICATE, None, me=stranger)
    assert status == 403 and "never joined" in refused.what and stranger.node_id in refused.what


@pytest.mark.parametrize("path", [BOOKS_RECEIPTS, BOOKS_CERTIFICATE])
async def test_a_request_without_proof_gets_nothing(hub: Asked, path: str) -> None:
    assert (await hub.once(path, WANTED, None))[0] == 426
    forged = Credentials(hello=b"x", nonce=bytes(32), proof=b"y")
    assert (await hub.once(path, WANTED, forged))[0] == 400
    me = Identity.generate()
    hub.book.barred.add(me.node_id)
    status, refused = await hub.refused(path, WANTED, me=me)
    assert (status, refused.code) == (403, RefusalCode.BANNED) and hub.asked == []


@pytest.mark.parametrize("hub", [{"join": "invite", "invite_tokens": ("the-token-of-all",)}], indirect=True)
async def test_if_joining_needs_an_invite_so_do_requests(hub: Asked) -> None:
    status, refused = await hub.refused(BOOKS_RECEIPTS, WANTED, me=Identity.generate())
    assert (status, refused.code) == (403, RefusalCode.BAD_TOKEN)
    assert (await hub.answer(BOOKS_RECEIPTS, WANTED, me=Identity.generate(), token="the-token-of-all"))[0] == 200


@pytest.mark.parametrize(
    ("body", "got"),
    [
        (b"", "not MessagePack"),
        (b"\xc1", "not MessagePack"),
        (b"\x80", "not valid"),
        (encode(Goodbye()), "wrong message type"),
        (encode(ReceiptsWanted(rollout_ids=("1-0",) * (MOST_RECEIPTS + 1))), "too many receipts"),
        (bytes(own_books.BODY_BYTES + 1), "too many receipts"),
    ],
)
async def test_malformed_requests_are_refused(hub: Asked, body: bytes, got: str) -> None:
    status, refused = await hub.refused(BOOKS_RECEIPTS, body, me=Identity.generate())
    assert status == 400 and got in refused.what and hub.asked == []


async def test_a_node_that_asks_too_often_waits_and_others_do_not(hub: Asked) -> None:
    me = Identity.generate()
    statuses = [(await hub.answer(BOOKS_RECEIPTS, WANTED, me=me))[0] for _ in range(6)]
    assert statuses == [200] * 4 + [429] * 2
    assert (await hub.answer(BOOKS_RECEIPTS, WANTED, me=Identity.generate()))[0] == 200
    hub.now += 1.0
    assert (await hub.answer(BOOKS_RECEIPTS, WANTED, me=me))[0] == 200
