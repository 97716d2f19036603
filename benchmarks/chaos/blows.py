"""Blows (failures inflicted on a run), and the choice of blows for a round."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final

import psutil

from benchmarks.chaos.scene import Scene, faketime, lacking_memory
from benchmarks.harness import small_disk
from echo_hub.learner.process import WORKER as LEARNER
from echo_node.backends.process import WORKER as ENGINE

VERIFIER: Final = "echo_hub.verify.worker"
SCORER: Final = "echo_hub.scoring.worker"
HUB_KILLED: Final = "hub killed"
MEMORY_SHORT: Final = "memory short"
LASTS_S: Final = 3.0
"""Duration in seconds of blows that the benchmark must undo, such as a slow line or a suspended process."""
DELAY_S: Final = 0.3
SHARE: Final = 0.3
"""Share of messages that the disturbed line between nodes and hub sends twice, or swaps with the next message."""
JUMPS_S: Final = (3_600.0, -1_800.0, 86_400.0, -86_400.0)
LEAST_BYTES: Final = 2**14
"""Bytes that stay free when a blow fills the hub's disk."""


Strike = Callable[[Scene, random.Random], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of blow (inflicted failure). `strike` inflicts it, and returns True if there was a target, such as a
    running process. `weight` is the number of times that a shuffled deck of blows contains it. `lacks` says why this
    machine cannot inflict it; "" if it can.
    """

    name: str
    strike: Strike
    weight: int = 1
    is_kill: bool = False
    lacks: str = ""


def _later(scene: Scene, end: Callable[[], object]) -> None:
    """Undo a blow after LASTS_S seconds, or when the scene ends."""

    async def undo() -> None:
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            end()

    task = asyncio.create_task(undo())
    scene.in_background.add(task)
    task.add_done_callback(scene.in_background.discard)


def _kill_of_hub(module: str = "") -> Strike:
    """Return a blow that kills the hub, or its child process that runs this module."""

    async def strike(scene: Scene, _: random.Random) -> bool:
        return scene.hub.kill(module)

    return strike


def _hang_of_hub(module: str = "") -> Strike:
    async def strike(scene: Scene, _: random.Random) -> bool:
        return _hang(scene, scene.hub.found(module))

    return strike


async def _kill_node(scene: Scene, chance: random.Random) -> bool:
    return chance.choice(scene.nodes).kill()


async def _kill_engine(scene: Scene, chance: random.Random) -> bool:
    return chance.choice(scene.nodes).kill(ENGINE)


async def _hang_engine(scene: Scene, chance: random.Random) -> bool:
    return _hang(scene, chance.choice(scene.nodes).found(ENGINE))


def _hang(scene: Scene, process: psutil.Process | None) -> bool:
    if process is None:
        return False

    def go_on() -> None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    try:
        process.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return False
    _later(scene, go_on)
    return True


async def _cut(scene: Scene, _: random.Random) -> bool:
    return scene.wire.cut() > 0


def _disturb(attribute: str, value: float) -> Strike:
    """Return a blow that changes a property of the line between nodes and hub for LASTS_S seconds."""

    async def strike(scene: Scene, _: random.Random) -> bool:
        setattr(scene.wire, attribute, value)
        _later(scene, lambda: setattr(scene.wire, attribute, 0.0))
        return True

    return strike


async def _fill_disk(scene: Scene, _: random.Random) -> bool:
    disk = scene.disk
    if disk is None or disk.ballast.exists():
        return False
    await asyncio.to_thread(disk.fill, leave_bytes=LEAST_BYTES)
    _later(scene, disk.empty)
    return True


async def _squeeze(scene: Scene, _: random.Random) -> bool:
    if scene.memory is None:
        return False
    await asyncio.to_thread(scene.memory.squeeze)
    _later(scene, scene.memory.release)
    return True


async def _jump(scene: Scene, chance: random.Random) -> bool:
    if scene.clock is None:
        return False
    shift_s = float(scene.clock.read_text()) + chance.choice(JUMPS_S)
    scene.clock.write_text(f"{shift_s:+.0f}\n")
    return True


async def _restart_database(scene: Scene, _: random.Random) -> bool:
    if scene.database is None:
        return False
    await asyncio.to_thread(scene.database.stop)
    await asyncio.sleep(LASTS_S / 3)
    await asyncio.to_thread(scene.database.start)
    return True


async def _kill_gateway(scene: Scene, chance: random.Random) -> bool:
    return bool(scene.gateways) and chance.choice(scene.gateways).kill()


async def _kill_broker(scene: Scene, _: random.Random) -> bool:
    if scene.broker is None:
        return False
    await asyncio.to_thread(scene.broker.kill)
    await asyncio.sleep(LASTS_S / 3)
    await asyncio.to_thread(scene.broker.start)
    return True


OF_GATEWAYS: Final = (
    Kind(name="gateway killed", strike=_kill_gateway, weight=6, is_kill=True),
    Kind(name="broker killed", strike=_kill_broker, weight=3, is_kill=True),
)
DATABASE_RESTARTED: Final = Kind(name="database restarted", strike=_restart_database, weight=6)


@cache
def kinds() -> tuple[Kind, ...]:
    """List all kinds of blows (inflicted failures), also those that this machine cannot inflict."""
    return (
        Kind(name=HUB_KILLED, strike=_kill_of_hub(), weight=3, is_kill=True),
        Kind(name="learner killed", strike=_kill_of_hub(LEARNER), weight=3, is_kill=True),
        Kind(name="verifier killed", strike=_kill_of_hub(VERIFIER), weight=2, is_kill=True),
        Kind(name="scorer killed", strike=_kill_of_hub(SCORER), weight=2, is_kill=True),
        Kind(name="node killed", strike=_kill_node, weight=4, is_kill=True),
        Kind(name="engine killed", strike=_kill_engine, weight=4, is_kill=True),
        Kind(name="hub hung", strike=_hang_of_hub()),
        Kind(name="learner hung", strike=_hang_of_hub(LEARNER)),
        Kind(name="engine hung", strike=_hang_engine),
        Kind(name="connections cut", strike=_cut, weight=3),
        Kind(name="messages late", strike=_disturb("delay_s", DELAY_S)),
        Kind(name="messages twice", strike=_disturb("twice", SHARE), weight=2),
        Kind(name="messages swapped", strike=_disturb("swapped", SHARE), weight=2),
        Kind(name="disk full", strike=_fill_disk, weight=2, lacks=small_disk.LACKING),
        Kind(name=MEMORY_SHORT, strike=_squeeze, lacks=lacking_memory()),
        Kind(name="clock jumped", strike=_jump, weight=2, lacks="" if faketime() else "libfaketime is not installed"),
    )


def decks(chance: random.Random, *, on_postgresql: bool = False, by_gateways: bool = False) -> Iterator[Kind]:
    """Yield blows endlessly, one shuffled deck after another. A deck contains each possible kind `weight` times."""
    others = [*([DATABASE_RESTARTED] if on_postgresql else []), *(OF_GATEWAYS if by_gateways else [])]
    possible = [kind for kind in (*kinds(), *others) if not kind.lacks]
    while True:
        deck = [kind for kind in possible for _ in range(kind.weight)]
        chance.shuffle(deck)
        yield from deck
