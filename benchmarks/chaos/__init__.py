"""A run on its worst days: does it go on by itself, is what was acknowledged still there, does it learn as well?

A real hub and real nodes, each started again when it ends, as a service manager does, and nothing else done for them.
Round after round, what a run meets in months happens to it in seconds (`blows`): processes killed or hung, connections
cut, slow, messages twice or in another order (`wire`), a full disk, too little memory, a clock that jumps, a database
that starts again, gateways and their broker killed. Blows of a round come together; the next round waits until the run
has trained another step.

What must hold is looked for from outside: the line between hub and nodes is the witness of what was acknowledged, the
store's rows show what became of it (`books`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos import blows, disturbed, undisturbed
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
"""Of rounds: in each database, and with gateways before a hub on SQLite."""


def plan() -> list[Planned]:
    return [
        Planned(name=SQLITE, seconds=SECONDS[SQLITE] + 30),
        Planned(name=UNDISTURBED, seconds=120),
        Planned(name=POSTGRESQL, seconds=SECONDS[POSTGRESQL] + 30, lacks=lacking()),
        Planned(name=GATEWAYS, seconds=SECONDS[GATEWAYS] + 60, lacks=broker.lacking()),
    ]


def measure(seed: int, progress: Progress) -> Measurement:
    return measure_for(seed, progress, factor=1.0)


def measure_hours(seed: int, progress: Progress, *, hours: float) -> Measurement:
    """The rounds of all cases last so long together."""
    return measure_for(seed, progress, factor=hours * 3600 / sum(SECONDS.values()))


def measure_for(seed: int, progress: Progress, *, factor: float) -> Measurement:
    """`factor`: times SECONDS of rounds."""
    ends: dict[str, disturbed.End] = {}
    rows: list[dict[str, Any]] = []
    without = {kind.name: kind.lacks for kind in blows.kinds() if kind.lacks}
    calm: float | None = None

    def note() -> Measurement:
        progress.so_far = Measurement(
            headline=headline(list(ends.values()), rows, calm, ends.get(SQLITE)),
            rows=rows,
            shown=("case", "blows", "kills", "recovered_s", "step", "hub_starts"),
            conditions={"left out": without},
        )
        return progress.so_far

    for case in (SQLITE, POSTGRESQL, GATEWAYS):
        if progress.wants(case):
            with tempfile.TemporaryDirectory(prefix="echo-chaos-") as scratch:
                end = asyncio.run(
                    disturbed.run(
                        Path(scratch),
                        seed=seed,
                        seconds=factor * SECONDS[case],
                        on_postgresql=case == POSTGRESQL,
                        by_gateways=case == GATEWAYS,
                    )
                )
            ends[case] = end
            rows += [{"case": case, **row} for row in end.rounds]
            note()
            progress.done(
                case,
                {"rounds": len(end.rounds), "kills": end.kills, **end.books.as_dict(), "evaluated": end.evaluated},
            )
        if case == SQLITE and progress.wants(UNDISTURBED):
            end_of_it = ends.get(case)
            if end_of_it is not None and end_of_it.evaluated is not None:
                version, _ = end_of_it.evaluated
                with tempfile.TemporaryDirectory(prefix="echo-chaos-") as scratch:
                    calm = asyncio.run(undisturbed.accuracy(Path(scratch), seed=seed, policy_version=version))
                note()
                progress.done(UNDISTURBED, {"version": version, "accuracy": calm})
            else:
                progress.leave_out(UNDISTURBED, "there is no evaluated version of a disturbed run to compare with")
    return note()


def headline(
    ends: Sequence[disturbed.End], rows: Sequence[Mapping[str, Any]], calm: float | None, compared: disturbed.End | None
) -> dict[str, Any]:
    """`lost_after_ack`: rollouts that a node was told are committed and that the store does not have; `trained_twice`:
    members of groups in two steps' batches, or twice in one; `identity_holds`: leased = trained + evaluated + dropped +
    in flight; `recovered`: the share of rounds after which another step was trained, nobody having done anything;
    `hub_ended_unasked`: how often the hub was started again that neither a blow nor a lack of memory had killed;
    `reward_gap`: by how much more the undisturbed run's same version solves of the same held-out problems."""
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
    if blows.MEMORY_SHORT in struck:  # The system kills whom it likes.
        return 0
    starts: int = row["hub_starts"]
    return max(0, starts - struck.count(blows.HUB_KILLED))
