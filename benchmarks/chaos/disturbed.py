"""Rounds of blows on one run, each of which ends with the next trained step; and the same run without blows."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.blows import MEMORY_SHORT, Kind, decks, kinds
from benchmarks.chaos.memory import memory_group
from benchmarks.chaos.scene import Books, Scene, awaited, check, newest_evaluation, scene
from benchmarks.chaos.wire import Wire
from benchmarks.harness.broker import broker_process
from benchmarks.harness.postgresql import postgresql
from benchmarks.harness.site import free_port
from benchmarks.harness.small_disk import mounted

DISK_BYTES: Final = 2**29
STARTS_WITHIN_S: Final = 120.0
RECOVERS_WITHIN_S: Final = 90.0
MOST_AT_ONCE: Final = 4
APART_S: Final = 1.5
"""Most seconds from one blow of a round to the next."""
A_STEP_S: Final = 30.0
"""Upper bound for the seconds of an undisturbed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Result of a run. `evaluated` is the newest evaluated version with its accuracy."""

    rounds: list[dict[str, Any]]
    kills: int
    books: Books
    evaluated: tuple[int, float] | None


async def run(
    scratch: Path, *, seed: int, seconds: float, on_postgresql: bool = False, by_gateways: bool = False
) -> End:
    chance = random.Random(f"{seed}/{on_postgresql}/gateways" if by_gateways else f"{seed}/{on_postgresql}")
    possible = {kind.name for kind in kinds() if not kind.lacks}
    port = free_port()
    wire = Wire(free_port() if by_gateways else port, chance)
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        disk = stack.enter_context(mounted(scratch / "disk", DISK_BYTES)) if "disk full" in possible else None
        async with scene(
            scratch,
            wire,
            port,
            seed=seed,
            disk=disk,
            memory=stack.enter_context(memory_group()) if MEMORY_SHORT in possible else None,
            database=stack.enter_context(postgresql()) if on_postgresql else None,
            broker=stack.enter_context(broker_process(scratch)) if by_gateways else None,
            fake_clock="clock jumped" in possible,
        ) as there:
            if await there.reaches(1, within_s=STARTS_WITHIN_S) is None:
                raise TimeoutError(f"the run has not begun: {(scratch / 'hub.log').read_text()[-2000:]}")
            blows, until = (
                decks(chance, on_postgresql=on_postgresql, by_gateways=by_gateways),
                time.monotonic() + seconds,
            )
            while time.monotonic() < until:
                rounds.append(await _round(there, blows, chance))
            await there.quiet()
        books = check(there.engine, wire.acknowledged)
        evaluated = newest_evaluation(there.engine)
    return End(rounds=rounds, kills=sum(row["kills"] for row in rounds), books=books, evaluated=evaluated)


async def _round(there: Scene, blows: Iterator[Kind], chance: random.Random) -> dict[str, Any]:
    """Inflict a few blows, and measure the seconds from the last blow until another step is trained."""
    struck, kills, starts = [], 0, there.hub.num_starts
    for kind in islice(blows, chance.randint(1, MOST_AT_ONCE)):
        if await kind.strike(there, chance):
            struck.append(kind.name)
            kills += kind.is_kill
        await asyncio.sleep(chance.uniform(0.0, APART_S))
    began = time.monotonic()
    before = await there.reaches(0, within_s=RECOVERS_WITHIN_S)  # Waits until the database answers.
    after = None if before is None else await there.reaches(before + 1, within_s=RECOVERS_WITHIN_S)
    return {
        "blows": ", ".join(struck) or "none",
        "kills": kills,
        "recovered_s": None if after is None else time.monotonic() - began,
        "step": before,
        "hub_starts": there.hub.num_starts - starts,
    }


async def undisturbed_accuracy(scratch: Path, *, seed: int, policy_version: int) -> float:
    """Return the held-out accuracy of a version of the same run without blows. Raises TimeoutError."""
    port = free_port()
    async with scene(scratch, Wire(port, random.Random(seed)), port, seed=seed) as there:
        look = partial(newest_evaluation, there.engine, of_version=policy_version)
        found = await awaited(look, within_s=A_STEP_S * max(1, policy_version))
    if found is None:
        raise TimeoutError(
            f"version {policy_version} is not evaluated: see {(scratch / 'hub.log').read_text()[-2000:]}"
        )
    return found[1]
