"""A whole node with its engine's child process, on a hub that always has work. The caller plays the node's owner.

The hub is a `DrivenHub` without training, so only the node uses the processor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.harness.driven_hub import DrivenHub
from benchmarks.harness.engine import GROUP_SIZE, PROMPT_TOKENS
from benchmarks.harness.models import HALF_GIGABYTE, QWEN3_06B, SMALL, Shape, random_model
from echo_node.config import NodeConfig
from echo_node.core.events import Event, RolloutsDrawn, RolloutsFinished
from echo_node.core.manners import MannersConfig, SensorReading
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Joining
from echo_node.host.paths import NodePaths
from echo_node.panel import NodeSnapshot, PlainPanel
from echo_shared.signing import key_file
from echo_shared.wire.messages import LeaseReturned, NodeStatus, Rollout, RolloutParts

PATIENCE_S: Final = 300.0
LOOK_S: Final = 0.002
MAX_TOKENS: Final = 512
STREAM_S: Final = 5.0
FREE: Final = SensorReading(full_screen=False)
GAME: Final = SensorReading(full_screen=True)


SHAPES: Final[Mapping[str, Shape]] = {"small": SMALL, "500 MB": HALF_GIGABYTE, "0.6B": QWEN3_06B}

Models = Callable[[str], Path]
"""Function that returns the directory of a base model by name, and makes the model on first use."""


def made_in(directory: Path, seed: int) -> Models:
    return lambda name: random_model(directory / name, SHAPES[name], seed)


class Owner:
    """Replaces the sensors by which a node notices that its owner uses the machine; the caller sets their `reading`.
    `told` is the last reading that the node got, `told_at` the time when the node first got it.
    """

    def __init__(self) -> None:
        self.reading = FREE
        self.told_at = 0.0
        self.told = FREE

    def read(self, settings: MannersConfig, *, engines: Collection[int], on_gpu: bool) -> SensorReading:
        reading = self.reading
        if reading is not self.told:
            self.told, self.told_at = reading, time.monotonic()
        return reading

    def close(self) -> None:
        """Do nothing, because no sensor is open."""


@dataclass(frozen=True, slots=True)
class Engine:
    backend: str
    model: str


class Overheard(Daemon):
    """A node daemon that records how many tokens its engine has sampled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drawn: dict[tuple[int, int], int] = {}
        """Number of tokens that the engine reported, by lease id and index. Revoked leases are included."""

    async def _tell_shell(self, event: Event) -> None:
        match event:
            case RolloutsDrawn(parts=parts):
                for part in parts:
                    self._note(part.lease_id, part.index, part.start + len(part.ids))
            case RolloutsFinished(rollouts=rollouts):
                for rollout in rollouts:
                    self._note(rollout.lease_id, rollout.index, len(rollout.completion_ids))
        await super()._tell_shell(event)

    def _note(self, lease_id: int, index: int, tokens: int) -> None:
        self.drawn[lease_id, index] = max(tokens, self.drawn.get((lease_id, index), 0))


class Scene:
    """A node that samples for its hub, with its engine's process and its owner. Use it only within the event loop."""

    def __init__(self, hub: DrivenHub, daemon: Overheard, owner: Owner, paths: NodePaths) -> None:
        self.hub = hub
        self.owner = owner
        self._daemon = daemon
        self._paths = paths

    @property
    def snapshot(self) -> NodeSnapshot:
        return self._daemon.snapshot()

    @property
    def engine(self) -> psutil.Process | None:
        return engine_of(psutil.Process())

    def lost_tokens(self) -> tuple[int, int]:
        """Count the tokens of returned rollouts that the node had not sent. Return lost tokens, and tokens of the step
        that the pause interrupted.

        The interrupted step has at most one token per rollout. A rollout without sent tokens may have two, because its
        first step also reads the prompt.
        """
        sent: dict[tuple[int, int], int] = {}
        returned: set[tuple[int, int]] = set()
        for message in self.hub.said:
            match message:
                case RolloutParts(parts=parts):
                    for part in parts:
                        key = part.lease_id, part.index
                        sent[key] = max(part.start + len(part.ids), sent.get(key, 0))
                case LeaseReturned(lease_id=lease_id, indices=indices):
                    returned |= {(lease_id, index) for index in indices}
        lost = under_way = 0
        for key in returned:
            unsent = self._daemon.drawn.get(key, 0) - sent.get(key, 0)
            of_the_step = min(unsent, 1 if sent.get(key) else 2)
            lost, under_way = lost + unsent - of_the_step, under_way + of_the_step
        return lost, under_way

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait until the condition is true; return the monotonic time."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - A process does not report that it stands still.
                await asyncio.sleep(LOOK_S)
        return time.monotonic()

    async def until_sampling(self) -> float:
        return await self.until(lambda: self.snapshot.activity == "sampling")

    async def pause(self) -> float:
        """Ask for a pause; return the monotonic time of the request."""
        asked_at = time.monotonic()
        await control.ask(self._paths.control_file, "pause")
        return asked_at

    async def resume(self) -> float:
        asked_at = time.monotonic()
        await control.ask(self._paths.control_file, "resume")
        return asked_at


def engine_of(process: psutil.Process) -> psutil.Process | None:
    """Return the engine's process among the descendants of `process`; None if there is none."""
    for child in process.children(recursive=True):
        try:
            if "echo_node.backends.worker" in child.cmdline():
                return child
        except psutil.Error:
            continue
    return None


@asynccontextmanager
async def working_hub(scratch: Path, base: Path, *, max_tokens: int = MAX_TOKENS) -> AsyncIterator[DrivenHub]:
    """During the block, run a hub with endless work for its node."""
    hub = DrivenHub(scratch / "hub")
    await hub.open()
    await hub.publish_base(base)
    leasing = asyncio.create_task(lease_for_ever(hub, max_tokens=max_tokens))
    try:
        yield hub
    finally:
        leasing.cancel()
        await asyncio.wait([leasing])
        await hub.end()


@asynccontextmanager
async def scene(scratch: Path, base: Path, engine: Engine) -> AsyncIterator[Scene]:
    """Run a node during the block. Yield when its engine samples."""
    paths, owner = NodePaths.find(scratch / "node"), Owner()
    config = NodeConfig.model_validate(
        {
            "backend": engine.backend,
            "swarm_host": "127.0.0.1",
            "bench_seconds": 0,
            "width": GROUP_SIZE,
            "stream_s": STREAM_S,
            "manners": MannersConfig(priority="lowest"),
        }
    )
    async with working_hub(scratch, base) as hub:
        address = HubAddress.parse(hub.url, insecure=False)
        daemon = Overheard(
            paths=paths,
            config=config,
            me=key_file.load_or_create(paths.identity_key),
            joining=Joining(address=address, pinned=None, invite_token=None, patient=False),
            panel=PlainPanel(),
            sensors=owner,
        )
        node = asyncio.create_task(daemon.run())
        try:
            found = Scene(hub, daemon, owner, paths)
            await hub.until(lambda: hub.handshakes)
            await found.until_sampling()
            yield found
        finally:
            daemon.request_stop("the benchmark is over")
            await asyncio.wait([node], timeout=PATIENCE_S)


async def lease_for_ever(hub: DrivenHub, *, max_tokens: int = MAX_TOKENS) -> None:
    """Lease groups to the hub's node, always up to its capacity, until cancelled."""
    rng = np.random.default_rng(0)
    out: set[tuple[int, int]] = set()
    heard = number = capacity = 0
    while True:
        await hub.until(lambda heard=heard: len(hub.said) > heard)
        for message in hub.said[heard:]:
            if isinstance(message, NodeStatus):
                capacity = 0 if message.policy_version is None else message.capacity
            elif isinstance(message, Rollout):
                out.discard((message.lease_id, message.index))
            elif isinstance(message, LeaseReturned):
                out -= {(message.lease_id, index) for index in message.indices}
        heard = len(hub.said)
        while len(out) + GROUP_SIZE <= capacity:
            number += 1
            out |= {(number, index) for index in range(GROUP_SIZE)}
            fields: dict[str, Any] = {
                "prompt_ids": rng.integers(10, 8_000, PROMPT_TOKENS).astype(np.int32),
                "max_tokens": max_tokens,
                "stop_ids": (),
            }
            await hub.lease(number, version=0, count=GROUP_SIZE, deadline_s=600.0, **fields)
