"""A run whose completions last longer than a step: the nodes continue a running completion with each new version."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.capacity.paced_engine import TOKEN_S

pytestmark = pytest.mark.timeout(600)

S = 1000
"""Staleness bound, so large that the tokens of a killed node can still be continued minutes later."""
STEPS = 9
"""Minimum number of steps; the run lasts until the killed node's completions have been continued."""
SETTINGS: dict[str, dict[str, object]] = {
    "training": {
        "steps": 10_000,
        "groups_per_step": 2,
        "group_size": 4,
        "lora_rank": 4,
        "max_staleness": S,
        "on_new_version": "interrupt",
    },
    "sampling": {"temperature": 10.0, "max_tokens": 160},
    "learner": {"threads": 1, "checkpoints_kept": 10_000},
    "evaluation": {"problems": 2},
    "leases": {"first_window": 16},
}
"""Settings of the run. The high temperature makes the stop token as unlikely as others, so completions are long. The
tokens of all steps stay in the database, because many checkpoints are kept.
"""


async def slow_node(site: Any, url: str, name: str) -> Any:
    """Start a node that takes 50 ms per token. A completion has 20 tokens on average and at most 160."""
    environment = {**os.environ, TOKEN_S: "0.05", "ECHO_NODE_STREAM_S": "0.25"}
    paced = {"backend": "torch", "env": environment, "module": "benchmarks.capacity.paced_node"}
    return await site.node(url, name, "--width", "12", **paced)


def trained(database: sqlite3.Connection) -> list[tuple[int, int, list[tuple[str, int, int]]]]:
    """Return, for each trained rollout: step, number of tokens, and (node, version, number of tokens) of each version
    span.
    """
    rows = database.execute(
        """SELECT groups.step, rollouts.num_tokens, rollouts.node_id, rollouts.policy_version, payloads.spans
           FROM rollouts JOIN groups USING (group_id) JOIN payloads USING (lease_id, "index")
           WHERE rollouts.state = 'trained'"""
    ).fetchall()
    return [
        (step, count, [tuple(span) for span in json.loads(spans)] if spans else [(node_id, version, count)])
        for step, count, node_id, version, spans in rows
    ]


@pytest.mark.slow
async def test_a_run_trains_on_completions_of_several_versions(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run: Path = await site.make_run("run", "--mode", "async", **SETTINGS)
    hub, url = await site.hub(run)
    first = await slow_node(site, url, "first")
    await slow_node(site, url, "second")
    # A busy node skips versions, so wait for version 2 or any later one.
    await first.printed(r"Policy version ([2-9]|\d\d+) is here")
    await first.kill()
    await slow_node(site, url, "first")
    view = await until(url, lambda view: view["rollouts_gone_on"] > 0 and view["trained_step"] >= STEPS)
    status, said = await hub.end()
    assert status == 0, said

    accounting = view["accounting"]
    ends = accounting["trained"] + accounting["evaluated"] + sum(accounting["dropped"].values())
    assert accounting["leased"] == ends + accounting["in_flight"] and accounting["trained"] >= STEPS * 2 * 4
    assert "invalid" not in accounting["dropped"], "no honest node is refused"
    database = books(run)
    rollouts = trained(database)
    assert len(rollouts) >= accounting["trained"]
    mixed = 0
    for step, tokens, spans in rollouts:
        versions = [version for _, version, _ in spans]
        assert sum(count for _, _, count in spans) == tokens
        assert versions == sorted(versions)
        assert 0 <= step - 1 - versions[0] <= S, "the oldest token"
        mixed += len(set(versions)) > 1
    assert mixed > 0
    steps = database.execute(
        "SELECT step, group_ids, staleness, metrics FROM steps WHERE trained_at IS NOT NULL ORDER BY step"
    ).fetchall()
    for step, _, staleness, metrics in steps:
        of_step = [spans for taken, _, spans in rollouts if taken == step]
        oldest = max(step - 1 - spans[0][1] for spans in of_step)
        ages = [(step - 1 - version, count) for spans in of_step for _, version, count in spans]
        figures = json.loads(metrics)
        assert max(json.loads(staleness)) == oldest
        assert figures["share_mixed"] == sum(len({v for _, v, _ in spans}) > 1 for spans in of_step) / len(of_step)
        mean = sum(age * count for age, count in ages) / sum(count for _, count in ages)
        assert figures["token_staleness"] == pytest.approx(mean)
    credited = dict(database.execute("SELECT node_id, tokens FROM tallies WHERE outcome = 'trained'").fetchall())
    drawn: dict[str, int] = {}
    for _, _, spans in rollouts:
        for node_id, _, count in spans:
            drawn[node_id] = drawn.get(node_id, 0) + count
    assert credited == drawn
