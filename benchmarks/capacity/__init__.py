"""What keeps lent computers of use although they come and go: work that goes on elsewhere where it was cut off."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.capacity import migration
from benchmarks.measurement import Measurement
from benchmarks.progress import Planned, Progress

DESCRIPTION: Final = "Completions that are cut off on one sampling engine and go on on another"


def plan() -> list[Planned]:
    return migration.plan()


def measure(seed: int, progress: Progress) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="echo-capacity-") as directory:
        rows: list[dict[str, Any]] = migration.measure(Path(directory), progress, seed=seed)
    shares = [row["identical"] for row in rows]
    return Measurement(headline={"migrated_identical": min(shares, default=None)}, rows=rows)
