"""Measures the fixed cost of an episode's turn: time from the turn's lease to the next turn's lease, minus the time in
which the node samples.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.site import open_site, wait_until_ready

TURNS: Final = 20
WITHIN_S: Final = 300.0
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {"base": "builtin:small"},
    "task": {
        "name": "python:benchmarks.agents.talk:make",
        "options": {"turns": TURNS, "prompt_digits": 16, "answer_digits": 4},
    },
    "sampling": {"max_tokens": 4},
    "evaluation": {"problems": 1},
    "trust": {"verifier": "off"},
}


async def turn_times(seed: int, *, at_once: int, figure: str) -> dict[str, Any]:
    """Let a node play `at_once` episodes of one group. Return the times of a turn in milliseconds, the median named
    `figure`.

    `fixed`: from a turn's lease to the next turn's lease, without sampling. `node`: from the lease to the rollout's
    arrival at the hub, without sampling. `hub`: from this arrival to the next lease.
    """
    training = {"steps": 1, "groups_per_step": 1, "group_size": at_once, "max_staleness": 0}
    sections = {**SETTINGS, "run": {"seed": seed}, "training": training, "leases": {"first_window": at_once}}
    with tempfile.TemporaryDirectory(prefix="echo-agents-") as scratch, open_site(Path(scratch), sections) as site:
        wait_until_ready(site.url)
        site.node(["--backend", "torch", "--width", str(max(4, at_once))])
        site.wait_for_step(1, within_s=WITHIN_S)
        rows = site.rows(
            'SELECT group_id, "index", turn, leased_at, received_at, sampling_s'
            ' FROM rollouts JOIN payloads USING (lease_id, "index") ORDER BY group_id, "index", turn'
        )
    found = figures(rows)
    return {figure: found["fixed_ms_p50"], **found}


def figures(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the median times of a turn in milliseconds. `rows` are the turns of all episodes: (group, index, turn,
    time of the lease, time of arrival, seconds of sampling).
    """
    pairs = [(one, other) for one, other in itertools.pairwise(rows) if one[:2] == other[:2] and other[2] == one[2] + 1]
    nodes = [one[4] - one[3] - one[5] for one, _ in pairs]
    hubs = [other[3] - one[4] for one, other in pairs]
    whole = [node + hub for node, hub in zip(nodes, hubs, strict=True)]
    return {
        "turns": len(pairs),
        "fixed_ms_p50": 1e3 * statistics.median(whole),
        "fixed_ms_p95": 1e3 * statistics.quantiles(whole, n=20)[-1],
        "node_ms_p50": 1e3 * statistics.median(nodes),
        "hub_ms_p50": 1e3 * statistics.median(hubs),
    }
