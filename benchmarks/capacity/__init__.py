"""Is the learner kept busy by lent computers? Real runs beside what the capacity model says of them; and what keeps
such computers of use although they come and go: work that goes on elsewhere where it was cut off.

Nothing heavy is imported with the package: the processes of a real run are modules of it, and nodes load no torch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.measurement import Measurement
from benchmarks.progress import Planned, Progress

DESCRIPTION: Final = (
    "Real runs whose nodes, links and learner take their time: how busy the learner was, and how busy the capacity "
    "model says it is; and completions that are cut off on one sampling engine and go on on another"
)


def plan() -> list[Planned]:
    from benchmarks.capacity import migration, overlap

    return [*overlap.plan(), *migration.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    from benchmarks.capacity import migration, overlap

    real_runs = overlap.measure(progress, seed=seed)
    with tempfile.TemporaryDirectory(prefix="echo-capacity-") as directory:
        migrated: list[dict[str, Any]] = migration.measure(Path(directory), progress, seed=seed)
    shares = [row["identical"] for row in migrated]
    return Measurement(
        headline={**overlap.headline(real_runs), "migrated_identical": min(shares, default=None)},
        rows=[*real_runs, *migrated],
    )
