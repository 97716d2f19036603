"""A process with many scripted nodes, or with many clients of the echo server. It sends the load that it is told to
send, and counts the answers.

The nodes check no message and sample nothing, to leave the processor to the hub.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import aiohttp
import msgpack
import numpy as np

from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import encode
from echo_shared.wire.credentials import Credentials, challenge_of
from echo_shared.wire.messages import NodeStatus
from echo_shared.wire.messages.fields import pack_array
from echo_shared.wire.sessions import NodeSession

OVERHEAD_BYTES: Final = 330
"""Approximate bytes of a rollout's frame without its tokens."""
VARIANTS: Final = 64
"""Number of different completions; nodes send one after the other."""
DIGITS: Final = (20, 30)
"""Range of token ids in completions. None of these ids is a stop token of the built-in model."""


class Completions:
    """Completions of one size; each ends with `stop_id`."""

    def __init__(self, frame_bytes: int, stop_id: int, *, seed: int) -> None:
        rng = np.random.default_rng(seed)
        count = (frame_bytes - OVERHEAD_BYTES) // 8
        self._variants = []
        for _ in range(VARIANTS):
            ids = rng.integers(*DIGITS, count, np.int32)
            ids[-1] = stop_id
            logprobs = -rng.exponential(0.5, count).astype(np.float32)
            self._variants.append((pack_array(ids), pack_array(logprobs)))
        self._next = 0

    def frame(self, lease: dict[str, Any], index: int) -> tuple[str, bytes]:
        """Make a rollout of a lease; return its id and its frame."""
        ids, logprobs = self._variants[self._next % VARIANTS]
        self._next += 1
        rollout_id = f"{lease['lease_id']}-{index}"
        fields = {
            "type": "rollout",
            "rollout_id": rollout_id,
            "lease_id": lease["lease_id"],
            "group_id": lease["group_id"],
            "index": index,
            "policy_version_start": lease["policy_version"],
            "policy_version_end": lease["policy_version"],
            "completion_ids": ids,
            "behavior_logprobs": logprobs,
            "finish_reason": "stop",
            "sampling_s": 0.5,
            "num_given": 0,
            "versions": (),
        }
        return rollout_id, msgpack.packb(fields)


PROCESSES: Final = 2
ANSWERS_WITHIN_S: Final = 180.0
ENDS_WITHIN_S: Final = 10.0
JOINING: Final = 32
PACE_S: Final = 0.002
HOLD_S: Final = 1.0
"""Seconds for which a working node holds a rollout at less than full load. Nodes that this load does not need are
paused: if all nodes worked more slowly instead, the hub would see all of them become slow at once.
"""
FOREVER: Final = aiohttp.ClientTimeout(total=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    frame_bytes: int
    per_s: float | None
    """Rollouts per second to send; with None, every leased rollout is sent at once."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of a lender process (with many scripted nodes or clients) since its last report. `waits_s` holds the
    seconds until each rollout was acknowledged, or each frame echoed.
    """

    acked: int = 0
    scored: int = 0
    waits_s: list[float] = field(default_factory=list)
    ended: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        self.acked += other.acked
        self.scored += other.scored
        self.waits_s += other.waits_s
        self.ended += other.ended
        return self


@dataclass(frozen=True, slots=True)
class _Held:
    node: _Node
    lease: dict[str, Any]
    index: int


class _Node:
    def __init__(self, lender: Lender, socket: aiohttp.ClientWebSocketResponse, heartbeat_s: float) -> None:
        self.socket = socket
        self.heartbeat_s = heartbeat_s
        self.revoked: set[int] = set()
        self.works = True
        """False while the node is paused; it then asks for no rollouts."""
        self._lender = lender
        self._version = 0

    async def report(self) -> None:
        status = NodeStatus(
            activity="sampling",
            capacity=self._lender.capacity if self.works else 0,
            policy_version=self._version,
            tokens_per_s=400.0,
        )
        await self.socket.send_bytes(encode(status))

    async def beat(self, delay_s: float) -> None:
        """Send the node's status at each heartbeat, the first time after `delay_s`."""
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


class _Clients:
    def __init__(self, url: str, *, seed: int) -> None:
        self.counts = Counts()
        self.acked: list[str] = []
        self._url = url
        self._seed = seed
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, session: aiohttp.ClientSession, count: int) -> None:
        places = asyncio.Semaphore(JOINING)

        async def one() -> None:
            async with places:
                await self._join(session)

        await asyncio.gather(*(one() for _ in range(count)))

    async def _join(self, session: aiohttp.ClientSession) -> None:
        raise NotImplementedError

    async def load(self, load: Load) -> None:
        raise NotImplementedError

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Lender(_Clients):
    def __init__(self, url: str, *, capacity: int, seed: int) -> None:
        super().__init__(url, seed=seed)
        self.capacity = capacity
        self.held: deque[_Held] = deque()
        self.sends_at_once = False
        self._sent_at: dict[str, float] = {}
        self._nodes: list[_Node] = []
        self._completions: Completions | None = None
        self._load: Load | None = None
        self._pacer: asyncio.Task[None] | None = None

    async def _join(self, session: aiohttp.ClientSession) -> None:
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
        self._nodes.append(node)

    async def load(self, load: Load) -> None:
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
            counts.scored += state == "scored"


class Echoed(_Clients):
    """Clients of the echo server. Each sends a frame once the previous one is back."""

    def __init__(self, url: str, *, seed: int) -> None:
        super().__init__(url, seed=seed)
        self._completions: Completions | None = None
        self._sockets: list[aiohttp.ClientWebSocketResponse] = []

    async def _join(self, session: aiohttp.ClientSession) -> None:
        self._sockets.append(await session.ws_connect(f"{self._url}/echo", compress=0, max_msg_size=0))

    async def load(self, load: Load) -> None:
        is_first = self._completions is None
        self._completions = Completions(load.frame_bytes, 1, seed=self._seed)
        for socket in self._sockets if is_first else ():
            self._begin(self._talk(socket))

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
    """Run a lender process: open `count` connections, then answer the requests that come through `pipe`."""
    asyncio.run(_serve(pipe, kind, url, count, capacity, seed))


async def _serve(pipe: Connection, kind: str, url: str, count: int, capacity: int, seed: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=FOREVER) as session:
        clients = Lender(url, capacity=capacity, seed=seed) if kind == "hub" else Echoed(url, seed=seed)
        await clients.join(session, count)
        pipe.send("joined")
        while (told := await _next(pipe)) is not None:
            if isinstance(told, Load):
                await clients.load(told)
            elif told == "counts":
                counts, clients.counts = clients.counts, Counts(ended=clients.counts.ended)
                pipe.send(counts)
            else:
                pipe.send(clients.acked)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _next(pipe: Connection) -> Any:
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


class LendersFailed(Exception):
    """A lender process (with many scripted nodes or clients) has ended, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenders:
    """All lender processes together. Each has many scripted nodes or clients. Make it with `opened`."""

    pipes: tuple[Connection, ...]

    def load(self, frame_bytes: int, *, per_s: float | None = None) -> None:
        """From now on, send rollouts or frames of this size, `per_s` of them per second; with None, as many as
        possible.
        """
        for pipe in self.pipes:
            pipe.send(Load(frame_bytes=frame_bytes, per_s=None if per_s is None else per_s / len(self.pipes)))

    def counts(self) -> Counts:
        total = Counts()
        for counts in self._ask("counts"):
            total += counts
        return total

    def acked(self) -> list[str]:
        return [rollout_id for acked in self._ask("acked") for rollout_id in acked]

    def _ask(self, what: str) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(what)
        return [answer(pipe) for pipe in self.pipes]


def answer(pipe: Connection, *, within_s: float = ANSWERS_WITHIN_S) -> Any:
    """Receive the answer of a lender process (with many scripted nodes or clients). Raises LendersFailed."""
    try:
        if pipe.poll(within_s):
            return pipe.recv()
    except EOFError as error:
        raise LendersFailed("a process of lenders has ended") from error
    raise LendersFailed(f"a process of lenders has said nothing for {within_s:g} s")


@contextmanager
def opened(kind: str, url: str, *, count: int, capacity: int = 0, seed: int) -> Iterator[Lenders]:
    """Open `count` connections: of nodes to the hub, or of clients to the echo server. Raises LendersFailed."""
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    number = min(PROCESSES, count)
    try:
        for place in range(number):
            ours, theirs = context.Pipe()
            of_this = count // number + (place < count % number)
            arguments = (theirs, kind, url, of_this, capacity, seed * number + place)
            process: BaseProcess = context.Process(target=main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            answer(pipe)
        yield Lenders(pipes=tuple(pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for one in processes:
            one.join(ENDS_WITHIN_S)
            if one.is_alive():
                one.kill()
                one.join()
