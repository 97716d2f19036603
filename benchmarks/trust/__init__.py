"""Hostile nodes, hubs and strangers against the real hub and the real node: what is detected, and what it costs.

- The protocol, the network, TLS, pages, members, checkers, scorers, and a node, attacked by hand: see `attacking`.
- Forged tokens and claims, by class of numerics, and honest nodes of each: see `tokens`.
- The same on a real vocabulary, judged offline: see `real`.
- What hostile rollouts cost the model: see `accuracy`. What the defence costs where nobody attacks: see `objectives`.

`attacks_tried` and `attacks_detected` count every attack of every class of numerics once. `stall_s_worst` is the
longest that the hub's `/healthz` took during any attack by hand on it, `rss_growth_mb_worst` what its memory grew by,
`log_kb_worst` what was added to its logs: too much of it, or anything that steers a terminal, is not detected.

The parts are loaded when they are called for: processes that one of them starts load this, and none of the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.measurement import Measurement
from benchmarks.progress import Planned, Progress

DESCRIPTION: Final = "Attacks on hub and nodes: what is detected, how soon, and what it costs the model and the hub"


def plan() -> list[Planned]:
    from benchmarks.trust import accuracy, attacking, objectives, real, tokens

    return [*attacking.plan(), *tokens.plan(), *real.plan(), *accuracy.plan(), *objectives.plan()]


def measure(seed: int, progress: Progress) -> Measurement:
    from benchmarks.trust import accuracy, attacking, objectives, real, tokens

    offline: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="echo-trust-") as scratch:
        attacks = attacking.measure(Path(scratch), progress, seed=seed)
        forged = tokens.measure(Path(scratch), progress, seed=seed)
        tried = [*attacks, *(row for row in forged if "detected" in row)]
        online = Measurement(headline={**headline(tried), **tokens.headline(forged)}, rows=[*attacks, *forged])
        for found in real.measure(Path(scratch), progress, seed=seed):
            offline += found
            progress.so_far = Measurement(
                headline={**online.headline, **real.headline(offline)}, rows=[*online.rows, *offline]
            )
        runs = accuracy.measure(Path(scratch), progress, seed=seed)
        undisturbed = objectives.measure(progress, seed=seed)
    return Measurement(
        headline={
            **online.headline,
            **real.headline(offline),
            **accuracy.headline(runs),
            **objectives.headline(undisturbed),
        },
        rows=[*online.rows, *offline, *runs, *undisturbed],
    )


def headline(attacks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts, and the worst of what the hub's users would have felt."""
    if not attacks:
        return {}
    worst = {
        f"{name}_worst": max((row[name] for row in attacks if name in row), default=None)
        for name in ("stall_s", "rss_growth_mb", "log_kb")
    }
    detected = sum(row["detected"] for row in attacks)
    return {"attacks_tried": len(attacks), "attacks_detected": detected, **worst}
