"""A run with many failures: does it recover by itself, keep acknowledged rollouts, and learn like an undisturbed one?

Hub and nodes are real. A supervisor restarts ended processes like a service manager; nothing else helps the run. Each
round inflicts several failures (`blows`) within seconds: processes are killed or hang, connections break or are slow,
messages come twice or in another order (`wire`), the disk is full, memory is short, the clock jumps, the database
restarts, gateways and their broker are killed. The next round waits until the run has trained another step.

The checks do not rely on the hub's own report: the relay between hub and nodes (`wire`) records each acknowledged
rollout, and `scene.check` looks up the state of these rollouts in the database.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.blows import HUB_KILLED, MEMORY_SHORT, Kind, decks, kinds
from benchmarks.chaos.scene import Books, Scene, awaited, check, memory_group, newest_evaluation, scene
from benchmarks.chaos.wire import Wire
from benchmarks.harness import broker
from benchmarks.harness.broker import broker_process
from benchmarks.harness.postgresql import lacking, postgresql
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import free_port
from benchmarks.harness.small_disk import mounted

DESCRIPTION: Final = "A run whose processes, connections, disk, memory, clock and database fail again and again"
SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
GATEWAYS: Final = "gateways"
UNDISTURBED: Final = "undisturbed"
SECONDS: Final[Mapping[str, float]] = {SQLITE: 390.0, POSTGRESQL: 90.0, GATEWAYS: 90.0}
"""Seconds of all rounds (failures, then recovery) of a case. In the case GATEWAYS, gateways hold the nodes'
connections, and the hub uses SQLite.
"""


def plan() -> list[Planned]:
    return [
        Planned(name=SQLITE, seconds=SECONDS[SQLITE] + 30),
        Planned(name=UNDISTURBED, seconds=120),
        Planned(name=POSTGRESQL, seconds=SECONDS[POSTGRESQL] + 30, lacks=lacking()),
        Planned(name=GATEWAYS, seconds=SECONDS[GATEWAYS] + 60, lacks=broker.lacking()),
    ]


def measure(seed: int, progress: Progress, *, hours: float | None = None) -> Measurement:
    """Measure all wanted cases. `hours`: total time of the rounds of all cases."""
    factor = 1.0 if hours is None else hours * 3600 / sum(SECONDS.values())
    ends: dict[str, End] = {}
    rows: list[dict[str, Any]] = []
    calm: float | None = None

    def note() -> Measurement:
        progress.so_far = Measurement(
            headline=headline(list(ends.values()), rows, calm, ends.get(SQLITE)),
            rows=rows,
            shown=("case", "blows", "kills", "recovered_s", "step", "hub_starts"),
            conditions={"left out": {kind.name: kind.lacks for kind in kinds() if kind.lacks}},
        )
        return progress.so_far

    for case in (SQLITE, POSTGRESQL, GATEWAYS):
        if progress.wants(case):
            with tempfile.TemporaryDirectory(prefix="echo-chaos-") as scratch:
                run = disturbed_run(
                    Path(scratch),
                    seed=seed,
                    seconds=factor * SECONDS[case],
                    on_postgresql=case == POSTGRESQL,
                    by_gateways=case == GATEWAYS,
                )
                end = ends[case] = asyncio.run(run)
            rows += [{"case": case, **row} for row in end.rounds]
            note()
            told = {"rounds": len(end.rounds), "kills": end.kills, **asdict(end.books), "evaluated": end.evaluated}
            progress.done(case, told)
        if case == SQLITE and progress.wants(UNDISTURBED):
            compared = ends.get(SQLITE)
            if compared is None or compared.evaluated is None:
                progress.leave_out(UNDISTURBED, "there is no evaluated version of a disturbed run to compare with")
                continue
            version, _ = compared.evaluated
            with tempfile.TemporaryDirectory(prefix="echo-chaos-") as scratch:
                calm = asyncio.run(undisturbed_accuracy(Path(scratch), seed=seed, policy_version=version))
            note()
            progress.done(UNDISTURBED, {"version": version, "accuracy": calm})
    return note()


def headline(
    ends: Sequence[End], rows: Sequence[Mapping[str, Any]], calm: float | None, compared: End | None
) -> dict[str, Any]:
    """`lost_after_ack`: acknowledged rollouts that the database lacks. `trained_twice`: rollouts in the batches of two
    steps, or twice in one batch. `identity_holds`: leased = trained + evaluated + dropped + in flight. `recovered`:
    share of rounds after which another step was trained. `hub_ended_unasked`: restarts of the hub that neither a kill
    nor short memory explains. `reward_gap`: held-out accuracy of a version of the undisturbed run, minus that of the
    disturbed run's version with the same number.
    """
    gap = None
    if calm is not None and compared is not None and compared.evaluated is not None:
        gap = calm - compared.evaluated[1]
    return {
        "lost_after_ack": sum(end.books.lost_after_ack for end in ends),
        "trained_twice": sum(end.books.trained_twice for end in ends),
        "identity_holds": all(end.books.identity_holds for end in ends),
        "recovered": sum(row["recovered_s"] is not None for row in rows) / len(rows) if rows else None,
        "recovered_s_worst": max((row["recovered_s"] or float("inf") for row in rows), default=None),
        "hub_ended_unasked": sum(_ended_unasked(row) for row in rows),
        "reward_gap": gap,
        "kills": sum(end.kills for end in ends),
        "acknowledged": sum(end.books.acknowledged for end in ends),
        "quarantined": sum(end.books.quarantined for end in ends),
    }


def _ended_unasked(row: Mapping[str, Any]) -> int:
    struck: list[str] = row["blows"].split(", ")
    # When memory is short, the system may kill any process, the hub included.
    if MEMORY_SHORT in struck:
        return 0
    starts: int = row["hub_starts"]
    return max(0, starts - struck.count(HUB_KILLED))


DISK_BYTES: Final = 2**29
STARTS_WITHIN_S: Final = 120.0
RECOVERS_WITHIN_S: Final = 90.0
MOST_AT_ONCE: Final = 4
APART_S: Final = 1.5
"""Maximum seconds between two blows (inflicted failures) of a round."""
A_STEP_S: Final = 30.0
"""Upper bound on the seconds that a training step takes without inflicted failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Result of a run. `evaluated` is the newest evaluated version, with its accuracy."""

    rounds: list[dict[str, Any]]
    kills: int
    books: Books
    evaluated: tuple[int, float] | None


async def disturbed_run(
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
    """Inflict a few blows; measure the seconds from the last blow until another step is trained."""
    struck, kills, starts = [], 0, there.hub.num_starts
    for kind in islice(blows, chance.randint(1, MOST_AT_ONCE)):
        if await kind.strike(there, chance):
            struck.append(kind.name)
            kills += kind.is_kill
        await asyncio.sleep(chance.uniform(0.0, APART_S))
    began = time.monotonic()
    # Step 0 is always reached, so this waits only until the database answers.
    before = await there.reaches(0, within_s=RECOVERS_WITHIN_S)
    after = None if before is None else await there.reaches(before + 1, within_s=RECOVERS_WITHIN_S)
    return {
        "blows": ", ".join(struck) or "none",
        "kills": kills,
        "recovered_s": None if after is None else time.monotonic() - began,
        "step": before,
        "hub_starts": there.hub.num_starts - starts,
    }


async def undisturbed_accuracy(scratch: Path, *, seed: int, policy_version: int) -> float:
    """Return the held-out accuracy of this version of the same run, repeated without inflicted failures. Raises
    TimeoutError.
    """
    port = free_port()
    async with scene(scratch, Wire(port, random.Random(seed)), port, seed=seed) as there:
        look = partial(newest_evaluation, there.engine, of_version=policy_version)
        found = await awaited(look, within_s=A_STEP_S * max(1, policy_version))
    if found is None:
        raise TimeoutError(
            f"version {policy_version} is not evaluated: see {(scratch / 'hub.log').read_text()[-2000:]}"
        )
    return found[1]
