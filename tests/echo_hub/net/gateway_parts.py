"""A gateway (the hub's end of the nodes' connections) behind a real server, and nodes on real sockets, honest or
hostile.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.gateway import Gateway, NodeInfo
from echo_hub.net.invitations import Invitations
from echo_hub.net.server import Server
from echo_shared.errors import RefusedError
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import decode_from_hub
from echo_shared.wire.credentials import REFUSED_TYPE, Credentials, challenge_of
from echo_shared.wire.messages import (
    ArtefactOffer,
    Challenge,
    FromHub,
    FromNode,
    LeaseRevoked,
    NodeStatus,
    RefusalCode,
    Refused,
    Welcome,
)
from echo_shared.wire.messages import DropReason as Reason
from echo_shared.wire.sessions import NodeSession

DEADLINE_S = 60.0
OFFER = ArtefactOffer(manifest=b"m", signature=bytes(64), torrent=b"t", web_seed_path="/artefacts/base")


def status(capacity: int) -> NodeStatus:
    return NodeStatus(activity="waiting", capacity=capacity, policy_version=0, tokens_per_s=1.0)


def revoked(lease_id: int) -> LeaseRevoked:
    return LeaseRevoked(lease_id=lease_id, reason=Reason.STALE)


class Book:
    """Stand-in for the hub behind the gateway; records all calls."""

    def __init__(self) -> None:
        self.joined: list[NodeInfo] = []
        self.said: list[tuple[str, FromNode]] = []
        self.left: list[str] = []
        self.barred: set[str] = set()
        self.known: set[str] = set()
        self.invitations = Invitations()
        self.refusal: RefusedError | None = None
        """Error to raise when a node whose proof is valid wants to join."""
        self.failure: Exception | None = None
        """Error to raise when a node sends a message."""
        self.may_join = asyncio.Event()
        self.may_join.set()
        self._news = asyncio.Condition()

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> Book:
        return self

    def admit(self, node_id: str) -> None:
        if node_id in self.barred:
            raise RefusedError("Banned.", do="Ask.", code=RefusalCode.BANNED)

    def knows(self, node_id: str) -> bool:
        return node_id in self.known

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        return self.invitations.find(node_id, token)

    async def node_joined(self, node: NodeInfo) -> Welcome:
        if self.refusal is not None:
            raise self.refusal
        if node.invite_id is not None:
            self.invitations.take(node.node_id, node.invite_id)
        await self._write_down(self.joined, node)
        await self.may_join.wait()
        return Welcome(
            run_id="r",
            run_name="a run",
            node_id=node.node_id,
            base=OFFER,
            policy=None,
            policy_version=0,
            tracker_path="/announce/x",
            heartbeat_s=1.0,
            run_keys=(),
        )

    async def node_said(self, node_id: str, message: FromNode, frame: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        await self._write_down(self.said, (node_id, message))

    async def node_left(self, node_id: str) -> None:
        await self._write_down(self.left, node_id)

    async def _write_down(self, page: list[Any], entry: object) -> None:
        async with self._news:
            page.append(entry)
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(condition)


class Node:
    """A node's end of one connection; `knock` opens its websocket."""

    def __init__(self, open_socket: Callable[[Credentials], Awaitable[ClientConnection]], me: Identity) -> None:
        self.me = me
        self.session = NodeSession(me=me, pinned_hub_key=None, software_version="1.2.3", nonce=secrets.token_bytes(32))
        self.socket: ClientConnection
        self._open_socket = open_socket

    async def challenged(self, hello: bytes) -> Challenge:
        with pytest.raises(InvalidStatus) as caught:
            await self._open_socket(Credentials(hello=hello))
        frame = challenge_of(caught.value.response.headers["WWW-Authenticate"])
        assert caught.value.response.status_code == 401 and frame is not None
        challenge = self.session.receive(frame)
        assert isinstance(challenge, Challenge)
        return challenge

    async def credentials(self, *, token: str | None = None) -> Credentials:
        """Return fresh credentials, good for one websocket only."""
        hello = self.session.hello()
        challenge = await self.challenged(hello)
        proof = self.session.proof(name="n", invite_token=token, backend="torch", device="cpu", swarm_port=6881)
        return Credentials(hello=hello, nonce=challenge.nonce, proof=proof)

    async def knock(self, credentials: Credentials | None = None) -> None:
        """Connect and do the handshake, up to the Welcome."""
        self.socket = await self._open_socket(credentials or await self.credentials())

    async def turned_away(self, credentials: Credentials) -> tuple[int, Refused]:
        """Return the HTTP status and the refusal that the hub answers instead of opening a websocket."""
        with pytest.raises(InvalidStatus) as caught:
            await self._open_socket(credentials)
        response = caught.value.response
        assert response.headers["Content-Type"] == REFUSED_TYPE and response.body is not None
        refused = decode_from_hub(response.body)
        assert isinstance(refused, Refused)
        return response.status_code, refused

    async def join(self) -> FromHub:
        await self.knock()
        return await self.hear()

    async def say(self, message: FromNode) -> None:
        await self.socket.send(self.session.send(message))

    async def hear(self) -> FromHub:
        async with asyncio.timeout(DEADLINE_S):
            return self.session.receive(bytes(await self.socket.recv(decode=False)))

    async def refusal(self) -> Refused:
        """Return the hub's refusal, and check that it is the hub's last message."""
        refused = await self.hear()
        assert isinstance(refused, Refused), refused
        await self.ended()
        return refused

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(websockets.ConnectionClosed):
                await self.socket.recv()


def node_at(
    url: str, stack: AsyncExitStack, me: Identity | None = None, headers: Mapping[str, str] = {}, **options: Any
) -> Node:
    """Return a node that connects to the hub or gateway at `url`. Its connections are closed with `stack`."""

    async def open_socket(credentials: Credentials) -> ClientConnection:
        said = {"Authorization": credentials.header(), **headers}
        return await stack.enter_async_context(
            websockets.connect(
                f"{url.replace('http', 'ws')}/node", close_timeout=0.1, additional_headers=said, **options
            )
        )

    return Node(open_socket, me or Identity.generate())


@dataclass
class Hub:
    identity: Identity
    gateway: Gateway
    book: Book
    server: Server
    connect: Callable[..., Node]

    async def node(self) -> Node:
        node = self.connect()
        assert isinstance(await node.join(), Welcome)
        return node


MakeHub = Callable[..., Awaitable[Hub]]


@asynccontextmanager
async def hubs() -> AsyncIterator[MakeHub]:
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> Hub:
            config = ServerConfig.model_validate({"port": 0, "heartbeat_s": 60.0, **settings})
            identity, book = Identity.generate(), Book()
            server = Server(config)
            gateway = Gateway(me=identity, settings=config, limits=server.limits)
            await server.open(gateway.routes(book))
            stack.push_async_callback(server.close)
            return Hub(identity, gateway, book, server, partial(node_at, server.url, stack))

        yield make
