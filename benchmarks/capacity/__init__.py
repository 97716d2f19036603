"""How busy volunteers' nodes keep a learner, and whether another node can continue a completion when its node is gone.

Real runs are compared with the capacity model's prediction. A completion that was cut on one engine must continue on
another engine as if it had never been cut. The processes of a real run import this package, so it imports nothing that
loads slowly.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from benchmarks.harness.progress import Measurement, Planned, Progress

DESCRIPTION: Final = (
    "Real runs with slowed nodes, links and learner: how busy the learner was, and how busy the capacity model expects "
    "it to be; utilisation of the demo's learner; completions that are cut on one engine and continue on another"
)


def plan() -> list[Planned]:
    from benchmarks import demo
    from benchmarks.capacity import migration, overlap

    return [*overlap.plan(), *demo.plan(), *migration.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    """`demo_utilisation`: share of time in which the demo's learner trains, not counting time without a ready batch.
    `demo_utilisation_of_all`: its share of all time. Both come from `benchmarks.demo`.
    """
    from benchmarks import demo
    from benchmarks.capacity import migration, overlap

    real_runs = overlap.measure(progress, seed=seed)
    of_demo = demo.measure(seed, progress).headline if progress.wants(demo.CASE) else {}
    with tempfile.TemporaryDirectory(prefix="echo-capacity-") as directory:
        migrated = migration.measure(Path(directory), progress, seed=seed)
    return Measurement(
        headline={
            **overlap.headline(real_runs),
            "demo_utilisation": of_demo.get("utilisation_when_ready"),
            "demo_utilisation_of_all": of_demo.get("utilisation"),
            "migrated_identical": min((row["identical"] for row in migrated), default=None),
        },
        rows=[*real_runs, *migrated],
        conditions={"demo": of_demo},
    )
