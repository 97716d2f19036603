"""A simulated day of volunteers' machines: they come and go, are paused by their owners and fail, and some keys lie.

A step takes a minute. A node is lent for half of its day and draws one long completion at a time, about 10 tokens a
second on the median node; lengths differ 1:4. Its owner needs it for 15 minutes every four hours. Every ten hours a
node vanishes; half of these failures also lose its unsent rollouts. Ten keys claim a capacity of 4,096 rollouts, return
nothing, and are replaced every hour. The pool samples 1.3 times what the learner needs (`echo_hub.simulator.rule`), on
average over the day, without pauses and failures.

Nodes come evenly over the day; in the cases of one continent, within ten hours of the day. With 100,000 nodes, only 16
steps are simulated. The first nine steps, which consume rollouts of the base version, are the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from benchmarks.simulate.cases import GROUP_SIZE, Case, Row, simulated, with_margin
from echo_hub.simulator.scenario import Scenario

MARGIN: Final = 1.3
STEP_S: Final = 60.0
DAY_S: Final = 86_400.0
DAY_STEPS: Final = 1_440
"""Steps of a day in which the learner never waits. If it waits, the run ends after a day with fewer steps."""


TOLD: Final = ("utilisation", "stale_share", "liars_share", "drops", "fewest_nodes", "most_nodes")


def _day(*, nodes: int, groups_per_step: int, steps: int = DAY_STEPS, begin_spread: float = 1.0) -> Case:
    what = "a day" if steps == DAY_STEPS else f"{steps} steps"
    name = f"{what} of {nodes:,} nodes" + (" on one continent" if begin_spread < 1 else "")
    sizes = {"nodes": nodes, "groups_per_step": groups_per_step, "steps": steps, "begin_spread": begin_spread}
    seconds = {10: 10.0, 1_000: 60.0}.get(nodes, 120.0)
    return Case(name=name, row=partial(_row, sizes=sizes), told=TOLD, seconds=seconds)


def _row(seed: int, *, sizes: Mapping[str, Any]) -> Row:
    row = simulated(with_margin(MARGIN, partial(_scenario, seed=seed, **sizes)))
    details = row["details"]
    there = [hour["nodes"] for hour in details["by_hour"]]
    return row | {
        "fewest_nodes": min(there),
        "most_nodes": max(there),
        "tokens_lost_per_failure": details["tokens_lost_per_failure"],
    }


def _scenario(
    *, seed: int, nodes: int, groups_per_step: int, steps: int, begin_spread: float, s_per_token: float
) -> Scenario:
    return Scenario.model_validate(
        {
            "run": {"seed": seed},
            "training": {
                "steps": steps,
                "groups_per_step": groups_per_step,
                "group_size": GROUP_SIZE,
                "max_staleness": 8,
            },
            "leases": {"deadline_s": 1_200.0},
            "learner": {"step_s": STEP_S},
            "nodes": {"count": nodes, "width": 1, "s_per_token": s_per_token},
            "lengths": {"tokens": 2_000.0, "ratio": 4.0, "prompts": 500},
            "availability": {
                "on_share": 0.5,
                "begin_spread": begin_spread,
                "pauses_per_hour": 0.25,
                "pause_s": 900.0,
            },
            "failures": {"per_hour": 0.1, "away_s": 120.0},
            "false_claims": {"count": 10, "fresh_key_s": 3_600.0},
            "measuring": {"limit_s": DAY_S, "warm_up_steps": 9},
        }
    )


EVENLY: Final = _day(nodes=1_000, groups_per_step=15)
CASES: Final = (
    _day(nodes=10, groups_per_step=1),
    EVENLY,
    _day(nodes=1_000, groups_per_step=15, begin_spread=10 / 24),
    _day(nodes=100_000, groups_per_step=1_500, steps=16),
)


def headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Return the main figures: those of the simulated day with 1,000 nodes that come evenly over the day."""
    row = rows.get(EVENLY.name, {})
    return {f"day_{name}": row.get(name) for name in ("utilisation", "stale_share", "tokens_lost_per_failure")}
