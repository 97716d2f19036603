"""Is the learner kept busy by lent computers? Real runs beside what the capacity model says of them; and what keeps
such computers of use although they come and go: work that goes on elsewhere where it was cut off.

Nothing heavy is imported with the package: the processes of a real run are modules of it, and nodes load no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.measurement import Measurement
from benchmarks.harness.progress import Planned, Progress

DESCRIPTION: Final = (
    "Real runs whose nodes, links and learner take their time: how busy the learner was, and how busy the capacity "
    "model says it is; the demo's learner; nodes that are killed; completions that are cut off on one sampling engine "
    "and go on on another"
)


def plan() -> list[Planned]:
    from benchmarks import demo
    from benchmarks.capacity import kills, migration, overlap

    return [*overlap.plan(), *demo.plan(), *kills.plan(), *migration.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    """`demo_utilisation`: of the time in which the demo's learner has a batch, the share in which it trains;
    `demo_utilisation_of_all`: of all time (`benchmarks.demo`)."""
    from benchmarks import demo
    from benchmarks.capacity import kills, migration, overlap

    real_runs = overlap.measure(progress, seed=seed)
    of_demo = demo.measure(seed, progress).headline if progress.wants(demo.CASE) else {}
    killed = _in_a_directory(kills.measure, progress, seed=seed)
    migrated = _in_a_directory(migration.measure, progress, seed=seed)
    return Measurement(
        headline={
            **overlap.headline(real_runs),
            "demo_utilisation": of_demo.get("utilisation_when_ready"),
            "demo_utilisation_of_all": of_demo.get("utilisation"),
            "migrated_identical": min((row["identical"] for row in migrated), default=None),
            "tokens_lost_per_kill": kills.headline(killed),
        },
        rows=[*real_runs, *killed, *migrated],
        conditions={"demo": of_demo},
    )


def _in_a_directory(
    measure_in: Callable[..., list[dict[str, Any]]], progress: Progress, *, seed: int
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="echo-capacity-") as directory:
        return measure_in(Path(directory), progress, seed=seed)
