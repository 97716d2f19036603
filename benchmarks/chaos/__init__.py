"""A run with many failures: does it recover by itself, keep every acknowledged rollout, and learn as well?

Hub and nodes are real. A supervisor restarts ended processes like a service manager; nothing else helps the run. Round
after round, failures of months happen in seconds (`blows`): processes are killed or hang, connections are cut or slow,
messages come twice or in another order (`wire`), the disk is full, memory is short, the clock jumps, the database
restarts, gateways and their broker are killed. The blows of a round come together. The next round waits until the run
has trained another step.

Checks come from outside: the line between hub and nodes records what was acknowledged, and the rows of the database
show what became of it (`books`)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos import blows, disturbed
from benchmarks.harness import broker
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.postgresql import lacking
from benchmarks.harness.progress import Planned, Progress

DESCRIPTION: Final = "A run whose processes, lines, disk, memory, clock and database fail, round after round"
SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
GATEWAYS: Final = "gateways"
UNDISTURBED: Final = "undisturbed"
SECONDS: Final[Mapping[str, float]] = {SQLITE: 390.0, POSTGRESQL: 90.0, GATEWAYS: 90.0}
"""Seconds during which rounds of failures follow each other, by case. In the case GATEWAYS, gateways hold the nodes'
connections, and the hub uses SQLite.
"""


def plan() -> list[Planned]:
    return [
        Planned(name=SQLITE, seconds=SECONDS[SQLITE] + 30),
        Planned(name=UNDISTURBED, seconds=120),
        Planned(name=POSTGRESQL, seconds=SECONDS[POSTGRESQL] + 30, lacks=lacking()),
        Planned(name=GATEWAYS, seconds=SECONDS[GATEWAYS] + 60, lacks=broker.lacking()),
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    return _measure(seed, progress, factor=1.0)


def measure_hours(seed: int, progress: Progress, *, hours: float) -> Measurement:
    """Measure with rounds of this many hours in all cases together."""
    return _measure(seed, progress, factor=hours * 3600 / sum(SECONDS.values()))


def _measure(seed: int, progress: Progress, *, factor: float) -> Measurement:
    """Measure with `factor` times `SECONDS` of rounds."""
    ends: dict[str, disturbed.End] = {}
    rows: list[dict[str, Any]] = []
    calm: float | None = None

    def note() -> Measurement:
        progress.so_far = Measurement(
            headline=headline(list(ends.values()), rows, calm, ends.get(SQLITE)),
            rows=rows,
            shown=("case", "blows", "kills", "recovered_s", "step", "hub_starts"),
            conditions={"left out": {kind.name: kind.lacks for kind in blows.kinds() if kind.lacks}},
        )
        return progress.so_far

    for case in (SQLITE, POSTGRESQL, GATEWAYS):
        if progress.wants(case):
            with tempfile.TemporaryDirectory(prefix="echo-chaos-") as scratch:
                disturbed_run = disturbed.run(
                    Path(scratch),
                    seed=seed,
                    seconds=factor * SECONDS[case],
                    on_postgresql=case == POSTGRESQL,
                    by_gateways=case == GATEWAYS,
                )
                end = ends[case] = asyncio.run(disturbed_run)
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
                calm = asyncio.run(disturbed.undisturbed_accuracy(Path(scratch), seed=seed, policy_version=version))
            note()
            progress.done(UNDISTURBED, {"version": version, "accuracy": calm})
    return note()


def headline(
    ends: Sequence[disturbed.End], rows: Sequence[Mapping[str, Any]], calm: float | None, compared: disturbed.End | None
) -> dict[str, Any]:
    """`lost_after_ack`: rollouts that were acknowledged to a node and that the database lacks. `trained_twice`: members
    of groups in the batches of two steps, or twice in one batch. `identity_holds`: leased = trained + evaluated +
    dropped + in flight. `recovered`: share of rounds after which another step was trained. `hub_ended_unasked`:
    hub restarts without a kill or short memory as cause. `reward_gap`: held-out accuracy of the undisturbed
    run's version minus that of the disturbed run's same version."""
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
    # When memory is short, the system may kill any process, so a restart of the hub has a cause.
    if blows.MEMORY_SHORT in struck:
        return 0
    starts: int = row["hub_starts"]
    return max(0, starts - struck.count(blows.HUB_KILLED))
