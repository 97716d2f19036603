"""A hand-made client of the node protocol, which sends any message that its caller wants.

The client keeps every message of the hub. `until` waits for further messages.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage, InvalidStatus
from websockets.http11 import Response

from echo_shared.credentials import Credentials, challenge_of
from echo_shared.identity import Identity
from echo_shared.messages import (
    ArtefactOffer,
    Challenge,
    FinishReason,
    FromNode,
    Lease,
    LeaseRevoked,
    NodeStatus,
    Peers,
    PolicyPublished,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Refused,
    Rollout,
    RolloutPart,
    RolloutParts,
    Standby,
    Welcome,
    rollout_id,
)
from echo_shared.sessions import NodeSession

WAITS_S: Final = 60.0


class Stranger:
    """A client with its own key. Close it after use."""

    socket: ClientConnection
    """Set by `join`."""

    def __init__(self, url: str, me: Identity | None = None, *, host: str | None = None) -> None:
        """`host` is the local address to connect from."""
        self.url = url
        self._whence = (host, 0) if host else None
        self.me = me or Identity.generate()
        self.session = NodeSession(me=self.me, pinned_hub_key=None, software_version="1", nonce=secrets.token_bytes(32))
        self.welcome: Welcome | None = None
        self.leases: dict[int, Lease] = {}
        self.policy_version = 0
        """The newest version that the hub announced."""
        self.num_leased = 0
        """Leased rollouts, revoked ones included."""
        self.states: dict[str, ReceiptState] = {}
        self.standby: Standby | None = None
        self.refused: Refused | None = None
        self.ended = False
        """True once the hub has closed the connection."""
        self.peers_told = 0
        """Peers that the hub announced."""
        self.offers: list[ArtefactOffer] = []
        self.precision = ""
        """The precision that `report` claims."""
        self.credentials = Credentials(hello=b"")
        """The credentials of the last handshake."""
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self._status: NodeStatus | None = None

    async def join(self, **changes: Any) -> Stranger:
        """Do the handshake. `changes` to the proof's fields are sent unchecked. `refused` holds the hub's refusal; it
        stays None if the hub only hangs up."""
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
        self.credentials = Credentials(hello=hello, nonce=challenge.nonce, proof=changed)
        opened = await self.ask(self.credentials)
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
        """Request a websocket. Return the connection, the hub's refusal, or None if the hub hangs up."""
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
                self.offers.append(message.offer)
            case Peers():
                self.peers_told += len(message.peers)
            case Lease():
                self.leases[message.lease_id] = message
                self.num_leased += len(message.indices)
            case LeaseRevoked():
                self.leases.pop(message.lease_id, None)
            case Receipts():
                self.states |= {one.rollout_id: one.state for one in message.receipts}
            case Standby():
                self.standby = message
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
        """Send the message with other values, unchecked."""
        fields = msgpack.unpackb(self.session.send(message))
        await self.socket.send(msgpack.packb({**fields, **changes}))

    async def report(self, capacity: int = 4096, tokens_per_s: float = 1.0) -> None:
        """Report the newest version and a capacity, now and after each new version."""
        self._status = NodeStatus(
            activity="waiting",
            capacity=capacity,
            policy_version=self.policy_version,
            tokens_per_s=tokens_per_s,
            precision=self.precision,
        )
        await self.say(self._status)

    async def lease(self) -> Lease:
        """Return a held lease; wait for one if there is none. Raises TimeoutError."""
        await self.until(lambda: self.leases)
        return next(iter(self.leases.values()))

    async def outcome(self, sent: Rollout) -> ReceiptState:
        """Wait until a rollout reaches its final state, or until the connection ends."""
        before = (None, ReceiptState.LEASED, ReceiptState.RECEIVED)
        await self.until(lambda: self.states.get(sent.rollout_id) not in before or self.ended)
        return self.states.get(sent.rollout_id, ReceiptState.LEASED)

    async def heard(self) -> None:
        """Wait until the hub has read every message sent so far."""
        self.states.pop("0-0", None)
        await self.say(ReceiptsWanted(rollout_ids=("0-0",)))
        await self.until(lambda: "0-0" in self.states or self.ended)


def body(index: int, count: int = 3) -> list[int]:
    """Return tokens of the built-in model. None of them is a stop token."""
    return [20 + (index + place) % 10 for place in range(count)]


def completion(lease: Lease, index: int, ids: list[int] | None = None, **changes: Any) -> Rollout:
    """Make a rollout of `ids`, by default `body(index)`, and the stop token. It is not validated."""
    tokens = np.array([*(ids or body(index)), lease.stop_ids[0]], np.int32)
    return Rollout.model_construct(
        **{
            "type": "rollout",
            "rollout_id": rollout_id(lease.lease_id, index),
            "lease_id": lease.lease_id,
            "group_id": lease.group_id,
            "index": index,
            "policy_version_start": lease.policy_version,
            "policy_version_end": lease.policy_version,
            "completion_ids": tokens,
            "behavior_logprobs": np.full(len(changes.get("completion_ids", tokens)), -1.0, np.float32),
            "finish_reason": FinishReason.STOP,
            "sampling_s": 0.01,
            **changes,
        }
    )


def part(
    lease: Lease, index: int, start: int, ids: Sequence[int], *, logprob: float = -1.0, version: int | None = None
) -> RolloutPart:
    """Make a part of a completion that begins with token `start`. It is not validated."""
    return RolloutPart.model_construct(
        lease_id=lease.lease_id,
        index=index,
        start=start,
        policy_version=lease.policy_version if version is None else version,
        ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), logprob, np.float32),
    )


def parts(*of: RolloutPart) -> RolloutParts:
    """Make the message that streams these parts."""
    return RolloutParts.model_construct(type="rollout_parts", parts=of)
