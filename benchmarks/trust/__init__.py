"""Attacks on a real hub, by hostile nodes and by clients without an invite (strangers): detection, and cost.

- Loads by strangers, and the hub's reaction to them: see `loads`.
- Forged tokens and claims, by class of numerics (backend and precision), and honest nodes of each class: see `tokens`.
- The same attacks on a model with a real vocabulary, judged without a running hub: see `real`.
- Cost of hostile rollouts for the model: see `accuracy`. Cost of the defence without attacks: see `objectives`.

`attacks_tried` and `attacks_detected` count every load once, and every attack by nodes once per class of numerics.
`stall_s_worst` is the slowest answer of the hub to `/healthz` during any load, `rss_growth_mb_worst` the growth of its
memory, `log_kb_worst` the growth of its logs. A load that fills the log, or writes a terminal's control characters to
it, counts as not detected.

Submodules are imported on use, because child processes import this package and should start quickly.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.progress import Measurement, Planned, Progress

DESCRIPTION: Final = "Attacks on a hub: which are detected, how soon, and at which cost for the model and the hub"


def plan() -> list[Planned]:
    from benchmarks.trust import accuracy, loads, objectives, real, tokens

    return [*loads.plan(), *tokens.plan(), *real.plan(), *accuracy.plan(), *objectives.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    from benchmarks.trust import accuracy, loads, objectives, real, tokens

    headline: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="echo-trust-") as directory:
        scratch = Path(directory)
        loaded = loads.measure(scratch, progress, seed=seed)
        forged = tokens.measure(scratch, progress, seed=seed)
        rows += [*loaded, *forged]
        tried = [row for row in rows if "detected" in row]
        if tried:
            detected = sum(row["detected"] for row in tried)
            headline |= {"attacks_tried": len(tried), "attacks_detected": detected, **loads.headline(loaded)}
        headline |= tokens.headline(forged)
        offline: list[dict[str, Any]] = []
        for found in real.measure(scratch, progress, seed=seed):
            offline += found
            rows += found
            headline |= real.headline(offline)
            progress.so_far = Measurement(headline=dict(headline), rows=list(rows))
        runs = accuracy.measure(scratch, progress, seed=seed)
    undisturbed = objectives.measure(progress, seed=seed)
    headline |= {**accuracy.headline(runs), **objectives.headline(undisturbed)}
    return Measurement(headline=headline, rows=[*rows, *runs, *undisturbed])
