"""A process with many nodes by hand, or many clients of the echo: it sends what it is told to, and counts.

A node's messages are checked nowhere here, and no model draws: what such a process costs does not count, and has to
leave the machine to the hub.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import aiohttp
import msgpack

from benchmarks.ingest.frames import Completions
from echo_shared.codec import encode
from echo_shared.credentials import Credentials, challenge_of
from echo_shared.identity import Identity
from echo_shared.messages import NodeStatus
from echo_shared.sessions import NodeSession

JOINING: Final = 32
"""At once."""
PACE_S: Final = 0.002
HOLD_S: Final = 1.0
"""At less than all that they can, so many nodes work that each has a rollout for about so long: the others are paused,
or the hub would see all of them become slow at once."""
FOR_EVER: Final = aiohttp.ClientTimeout(total=None)
SCORED: Final = frozenset({"scored", "trained"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What all nodes of a process send together."""

    frame_bytes: int
    per_s: float | None
    """None: whatever they are leased, at once."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Of a time. `waits_s`: from each rollout that was sent to its ack, or each frame to its echo."""

    acked: int = 0
    scored: int = 0
    dropped: int = 0
    waits_s: list[float] = field(default_factory=list)
    ended: int = 0
    """Connections that the hub has closed."""


@dataclass(frozen=True, slots=True)
class _Held:
    node: _Node
    lease: dict[str, Any]
    index: int


class _Node:
    """One connection to the hub."""

    def __init__(self, lender: Lender, socket: aiohttp.ClientWebSocketResponse, heartbeat_s: float) -> None:
        self.socket = socket
        self._lender = lender
        self.heartbeat_s = heartbeat_s
        self._version = 0
        self.revoked: set[int] = set()
        self.works = True
        """Else it is paused, and holds nothing."""

    async def report(self) -> None:
        status = NodeStatus(
            activity="sampling",
            capacity=self._lender.capacity if self.works else 0,
            policy_version=self._version,
            tokens_per_s=400.0,
        )
        await self.socket.send_bytes(encode(status))

    async def beat(self, delay_s: float) -> None:
        """As nodes do; not all at the same moment."""
        await asyncio.sleep(delay_s)
        with suppress(ConnectionError):
            while not self.socket.closed:
                await self.report()
                await asyncio.sleep(self.heartbeat_s)

    async def listen(self) -> None:
        with suppress(ConnectionError):
            async for message in self.socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    await self._hear(msgpack.unpackb(message.data))
        self._lender.counts.ended += 1

    async def _hear(self, said: dict[str, Any]) -> None:
        match said["type"]:
            case "receipts":
                self._lender.told(said["receipts"])
            case "lease":
                self._lender.held.extend(_Held(self, said, index) for index in said["indices"])
                if self._lender.sends_at_once:
                    await self._lender.send_held()
            case "lease_revoked":
                self.revoked.add(said["lease_id"])
            case "policy_published":
                self._version = said["policy_version"]
                await self.report()
            case _:
                pass


class Lender:
    """The nodes of one process."""

    def __init__(self, url: str, *, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.counts = Counts()
        self.held: deque[_Held] = deque()
        self.sends_at_once = False
        self.acked: list[str] = []
        """All that ever were."""
        self._url = url
        self._seed = seed
        self._sent_at: dict[str, float] = {}
        self._nodes: list[_Node] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._completions: Completions | None = None
        self._stop_id = 0
        self._load: Load | None = None
        self._pacer: asyncio.Task[None] | None = None

    async def join(self, session: aiohttp.ClientSession, count: int) -> None:
        places = asyncio.Semaphore(JOINING)

        async def one() -> None:
            async with places:
                self._nodes.append(await self._join(session))

        await asyncio.gather(*(one() for _ in range(count)))

    async def _join(self, session: aiohttp.ClientSession) -> _Node:
        own = NodeSession(
            me=Identity.generate(), pinned_hub_key=None, software_version="1", nonce=secrets.token_bytes(32)
        )
        hello = own.hello()
        headers = {"Authorization": Credentials(hello=hello).header()}
        async with session.get(f"{self._url}/node", headers=headers) as answer:
            challenge = challenge_of(answer.headers["WWW-Authenticate"]) or b""
        nonce: bytes = msgpack.unpackb(challenge)["nonce"]
        own.receive(challenge)
        proof = own.proof(name="lender", invite_token=None, backend="llama_cpp", device="cpu", swarm_port=0)
        headers = {"Authorization": Credentials(hello=hello, nonce=nonce, proof=proof).header()}
        socket = await session.ws_connect(f"{self._url}/node", headers=headers, compress=0, max_msg_size=0)
        welcome = msgpack.unpackb(await socket.receive_bytes())
        node = _Node(self, socket, welcome["heartbeat_s"])
        self._begin(node.listen())
        return node

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def load(self, load: Load) -> None:
        """From now on; first of all they say that they want work."""
        is_first, self._load = self._load is None, load
        self._completions = None
        self.sends_at_once = load.per_s is None
        if self._pacer is not None:
            self._pacer.cancel()
        self._pacer = asyncio.create_task(self._pace(load.per_s)) if load.per_s else None
        num_working = len(self._nodes) if load.per_s is None else max(1, round(load.per_s * HOLD_S / self.capacity))
        for number, node in enumerate(self._nodes):
            node.works = number < num_working
            if is_first:
                self._begin(node.beat(node.heartbeat_s * number / len(self._nodes)))
            else:
                await node.report()
        if self.sends_at_once:
            await self.send_held()

    async def send_held(self) -> None:
        while self.held:
            await self._send(self.held.popleft())

    async def _send(self, held: _Held) -> None:
        if held.lease["lease_id"] in held.node.revoked or held.node.socket.closed:
            return
        if self._completions is None:
            assert self._load is not None
            self._completions = Completions(self._load.frame_bytes, held.lease["stop_ids"][0], seed=self._seed)
        rollout_id, frame = self._completions.frame(held.lease, held.index)
        self._sent_at[rollout_id] = time.perf_counter()
        with suppress(ConnectionError):
            await held.node.socket.send_bytes(frame)

    async def _pace(self, per_s: float) -> None:
        began_at, sent = time.perf_counter(), 0
        while True:
            due = int((time.perf_counter() - began_at) * per_s)
            while sent < due:
                sent += 1
                if self.held:
                    await self._send(self.held.popleft())
            await asyncio.sleep(PACE_S)

    def told(self, receipts: list[dict[str, Any]]) -> None:
        now, counts = time.perf_counter(), self.counts
        for receipt in receipts:
            rollout_id, state = receipt["rollout_id"], receipt["state"]
            sent_at = self._sent_at.pop(rollout_id, None)
            if sent_at is not None and state != "dropped":
                counts.acked += 1
                counts.waits_s.append(now - sent_at)
                self.acked.append(rollout_id)
            if state == "scored":
                counts.scored += 1
            elif state == "dropped":
                counts.dropped += 1


class Echoed:
    """Clients of the echo; each sends a frame when it has had the one before back."""

    def __init__(self, url: str, *, seed: int) -> None:
        self.counts = Counts()
        self._url = url
        self._seed = seed
        self._tasks: list[asyncio.Task[None]] = []
        self._completions: Completions | None = None
        self._sockets: list[aiohttp.ClientWebSocketResponse] = []

    async def join(self, session: aiohttp.ClientSession, count: int) -> None:
        places = asyncio.Semaphore(JOINING)

        async def one() -> None:
            async with places:
                socket = await session.ws_connect(f"{self._url}/echo", compress=0, max_msg_size=0)
                self._sockets.append(socket)

        await asyncio.gather(*(one() for _ in range(count)))

    async def load(self, load: Load) -> None:
        """From now on."""
        self._completions = Completions(load.frame_bytes, 1, seed=self._seed)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._talk(socket)) for socket in self._sockets]

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        lease = {"lease_id": 1_000_000, "group_id": 100_000, "policy_version": 10}
        with suppress(ConnectionError):
            while not socket.closed:
                assert self._completions is not None
                sent_at = time.perf_counter()
                await socket.send_bytes(self._completions.frame(lease, 3)[1])
                await socket.receive()
                self.counts.acked += 1
                self.counts.waits_s.append(time.perf_counter() - sent_at)


def main(pipe: Connection, kind: str, url: str, count: int, capacity: int, seed: int) -> None:
    """The process: says "joined", then does what it is told."""
    asyncio.run(_serve(pipe, kind, url, count, capacity, seed))


async def _serve(pipe: Connection, kind: str, url: str, count: int, capacity: int, seed: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=FOR_EVER) as session:
        lender = Lender(url, capacity=capacity, seed=seed) if kind == "hub" else Echoed(url, seed=seed)
        await lender.join(session, count)
        pipe.send("joined")
        while (told := await _next(pipe)) is not None:
            if isinstance(told, Load):
                await lender.load(told)
            elif told == "counts":
                counts, lender.counts = lender.counts, Counts(ended=lender.counts.ended)
                pipe.send(counts)
            else:
                pipe.send(lender.acked if isinstance(lender, Lender) else [])
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _next(pipe: Connection) -> Any:
    """What the process is told; None: it is to end."""
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(pipe.fileno(), there.set)
    try:
        await there.wait()
        return pipe.recv()
    except (EOFError, OSError):
        return None
    finally:
        loop.remove_reader(pipe.fileno())
