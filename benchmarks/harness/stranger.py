"""A handwritten client of the node protocol, which sends any message that its caller wants, valid or not. It keeps
every message from the hub; `until` waits for further ones.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Final

import msgpack
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage, InvalidStatus
from websockets.http11 import Response

from echo_shared.signing.identity import Identity
from echo_shared.wire.credentials import Credentials, challenge_of
from echo_shared.wire.messages import (
    Challenge,
    FromNode,
    Lease,
    LeaseRevoked,
    NodeStatus,
    PolicyPublished,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Refused,
    Welcome,
)
from echo_shared.wire.sessions import NodeSession

WAITS_S: Final = 60.0


class Stranger:
    """A handwritten client of the node protocol, with its own key. Close it after use."""

    socket: ClientConnection
    """The websocket to the hub. `join` sets it."""

    def __init__(self, url: str, me: Identity | None = None, *, host: str | None = None) -> None:
        """`host` is the local address to connect from."""
        self.url = url
        self._whence = (host, 0) if host else None
        self.me = me or Identity.generate()
        self.session = NodeSession(me=self.me, pinned_hub_key=None, software_version="1", nonce=secrets.token_bytes(32))
        self.welcome: Welcome | None = None
        self.leases: dict[int, Lease] = {}
        self.policy_version = 0
        self.num_leased = 0
        """Number of rollouts leased to this client, revoked ones included."""
        self.states: dict[str, ReceiptState] = {}
        self.refused: Refused | None = None
        self.ended = False
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self._status: NodeStatus | None = None

    async def join(self, **changes: Any) -> Stranger:
        """Do the handshake. `changes` replace fields of the proof, and are not validated. If the hub refuses, `refused`
        holds its answer; None if the hub only closes the connection.
        """
        hello = self.session.hello()
        asked = await self.ask(Credentials(hello=hello))
        if asked is None:
            self.ended = True
            return self
        assert isinstance(asked, Response), "no websocket without a proof"
        challenge = self.session.receive(challenge_of(asked.headers["WWW-Authenticate"]) or b"")
        assert isinstance(challenge, Challenge)
        proof = self.session.proof(name="stranger", invite_token=None, backend="llama_cpp", device="cpu", swarm_port=0)
        changed = msgpack.packb({**msgpack.unpackb(proof), **changes}, unicode_errors="surrogatepass")
        opened = await self.ask(Credentials(hello=hello, nonce=challenge.nonce, proof=changed))
        if opened is None:
            self.ended = True
            return self
        if isinstance(opened, Response):
            refused = self.session.receive(bytes(opened.body or b""))
            assert isinstance(refused, Refused)
            self.refused, self.ended = refused, True
            return self
        self.socket = opened
        self._reader = asyncio.create_task(self._read())
        await self.until(lambda: self.welcome is not None or self.ended)
        return self

    async def ask(self, credentials: Credentials) -> ClientConnection | Response | None:
        """Request a websocket. Return the connection, the hub's refusal, or None if the hub only closes the
        connection.
        """
        headers = {"Authorization": credentials.header()}
        url = self.url.replace("http", "ws", 1) + "/node"
        try:
            return await connect(url, max_size=None, additional_headers=headers, local_addr=self._whence)
        except InvalidStatus as error:
            return error.response
        except InvalidMessage:
            return None

    async def close(self) -> None:
        if self._reader is not None:
            self.socket.transport.abort()
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            while True:
                message = self.session.receive(bytes(await self.socket.recv(decode=False)))
                self._hear(message)
                if isinstance(message, PolicyPublished) and self._status is not None:
                    await self.report(self._status.capacity, self._status.tokens_per_s)
                async with self._news:
                    self._news.notify_all()
        except websockets.ConnectionClosed:
            async with self._news:
                self.ended = True
                self._news.notify_all()

    def _hear(self, message: object) -> None:
        match message:
            case Welcome():
                self.welcome, self.policy_version = message, message.policy_version
            case PolicyPublished():
                self.policy_version = message.policy_version
            case Lease():
                self.leases[message.lease_id] = message
                self.num_leased += len(message.indices)
            case LeaseRevoked():
                self.leases.pop(message.lease_id, None)
            case Receipts():
                self.states |= {one.rollout_id: one.state for one in message.receipts}
            case Refused():
                self.refused = message
            case _:
                pass

    async def until(self, condition: Callable[[], Any], *, within_s: float = WAITS_S) -> None:
        """Wait until messages of the hub make the condition true. Raises TimeoutError."""
        async with asyncio.timeout(within_s), self._news:
            while not condition():
                await self._news.wait()

    async def say(self, message: FromNode) -> None:
        await self.socket.send(self.session.send(message))

    async def say_raw(self, message: FromNode, **changes: Any) -> None:
        """Send the message with `changes` to its fields, which are not validated."""
        fields = msgpack.unpackb(self.session.send(message))
        await self.socket.send(msgpack.packb({**fields, **changes}))

    async def report(self, capacity: int = 4096, tokens_per_s: float = 1.0) -> None:
        """Tell the hub the newest version and a capacity, now and after each new version, as a node does that wants
        leases.
        """
        self._status = NodeStatus(
            activity="waiting",
            capacity=capacity,
            policy_version=self.policy_version,
            tokens_per_s=tokens_per_s,
        )
        await self.say(self._status)

    async def heard(self) -> None:
        """Wait until the hub has read every message sent so far: it answers a query that is sent last."""
        self.states.pop("0-0", None)
        await self.say(ReceiptsWanted(rollout_ids=("0-0",)))
        await self.until(lambda: "0-0" in self.states or self.ended)
