"""Cases of the simulation: a grid of pools of unequal nodes that are just large enough, pools of ever more nodes, and
false claims.

In the grid, the median node's rollouts take about 2 s, and a version reaches all nodes 0.8 s after its step. The pool
samples 1.15 times what the learner needs (`echo_hub.simulator.rule`). The number of groups per step is chosen for this.
Since it must be whole, the nodes' speed is then adjusted slightly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from benchmarks.harness.progress import least, most
from echo_hub.driving.garbage import Garbage
from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.rule import demand_of, pool_of, useful_rollouts
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World

Row = dict[str, Any]
"""One case's row of the benchmark's table. Its `details`, if any, are listed as conditions instead of columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of the simulation. It is pickled, and measured in a separate process. `told` names the results that are
    printed.
    """

    name: str
    row: Callable[[int], Row]
    told: tuple[str, ...]
    seconds: float = 10.0
    lacks: str = ""


def measured(cases: Iterable[Case], rows: Mapping[str, Row]) -> list[Row]:
    return [rows[case.name] for case in cases if case.name in rows]


def simulated(scenario: Scenario, *, with_memory: bool = False) -> Row:
    """Return the figures of one scenario. Processor time is that of this process, with garbage collection as in the
    hub.
    """
    began_at = time.process_time()
    world = World(scenario, time.process_time)
    with Garbage() as garbage:
        world.core.handled = garbage.handled
        world.run()
    report = report_of(world)
    processor_s = time.process_time() - began_at
    check(report)
    return {
        **figures_of(report),
        "idle_nodes": report.idle_nodes_share,
        "drops": {reason: round(share, 4) for reason, share in report.drop_shares.items()},
        "worst_event_ms": report.core.worst_event_ms,
        "bytes_per_node": report.core.bytes_per_node if with_memory else None,
        "details": {**asdict(report), "rollouts_per_step": scenario.rollouts_per_step, "processor_s": processor_s},
    }


def figures_of(report: SimulationReport) -> Row:
    needed = report.needed_staleness
    return {
        "utilisation": report.utilisation,
        "stale_share": report.stale_share,
        "staleness": report.mean_staleness,
        "over_needed": None if needed is None else report.mean_staleness - needed,
        "liars_share": report.liars_share,
        "events_per_s": report.core.events_per_s,
    }


def check(report: SimulationReport) -> None:
    """Raise RuntimeError unless the report accounts for every leased rollout."""
    if not report.balanced:
        raise RuntimeError(f"rollouts are not accounted for: {report}")


MARGIN: Final = 1.15
"""Rollouts that the grid's pool samples in time (fresh enough to be trained), as a multiple of what the learner
needs.
"""
GROUP_SIZE: Final = 8
S_PER_TOKEN: Final = 0.02
"""Seconds per token of the median node. A rollout has 100 tokens."""
SIGMAS: Final = (0.5, 1.0)
STALENESS_BOUNDS: Final = (1, 2, 4)
STEPS: Final = {1.0: 120, 5.0: 60, 15.0: 30, 60.0: 12}
SIZES: Final = {10: 1_000, 1_000: 25, 100_000: 5}
MOST_GROUPS: Final = 4096
"""Maximum groups per step in a hub's config.toml."""
LIMIT: Final = 5
"""Limit on the virtual time of a run, as a multiple of the duration of all its steps without waits."""
NEVER_S: Final = 1e9


def grid_scenario(seed: int, *, sigma: float, max_staleness: int, step_s: float) -> Scenario:
    """Make a pool of 100 nodes that samples MARGIN times what the learner needs."""
    make = partial(_scenario, seed=seed, sigma=sigma, max_staleness=max_staleness, step_s=step_s)
    groups = max(1, int(margin_of(make()) / MARGIN))
    return with_margin(MARGIN, partial(make, groups=groups))


def grid_lacks(*, max_staleness: int, step_s: float) -> str:
    """Return why no pool of nodes can sample enough for the learner; "" if one can."""
    if margin_of(_scenario(seed=0, sigma=0.0, max_staleness=max_staleness, step_s=step_s)) > 0:
        return ""
    return "no such pool is enough: S steps are over before a median node has a version and returns a rollout"


def _scenario(
    *, seed: int, sigma: float, max_staleness: int, step_s: float, groups: int = 1, s_per_token: float = S_PER_TOKEN
) -> Scenario:
    return scenario_of(
        seed,
        training={"steps": STEPS[step_s], "groups_per_step": groups, "max_staleness": max_staleness},
        learner={"step_s": step_s},
        nodes={"sigma": sigma, "s_per_token": s_per_token},
    )


def _grid_row(seed: int, **grid: Any) -> Row:
    return simulated(grid_scenario(seed, **grid))


def _size_row(seed: int, *, nodes: int) -> Row:
    """Simulate a pool of `nodes` nodes. A step has half as many groups, up to the hub's limit."""
    scenario = scenario_of(
        seed,
        training={"steps": SIZES[nodes], "groups_per_step": min(nodes // 2, MOST_GROUPS)},
        learner={"step_s": 15.0},
        nodes={"count": nodes},
        measuring={"warm_up_steps": 2},
    )
    return simulated(scenario, with_memory=True)


def _size_name(nodes: int) -> str:
    return f"{nodes:,} nodes"


def _false_claims_row(seed: int, *, count: int, fresh_key_s: float) -> Row:
    honest = grid_scenario(seed, sigma=0.5, max_staleness=2, step_s=5.0)
    claims = honest.false_claims.model_copy(update={"count": count, "fresh_key_s": fresh_key_s})
    return simulated(honest.model_copy(update={"false_claims": claims}))


def headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    grid = measured(GRID, rows)
    few, many = (rows.get(_size_name(nodes), {}) for nodes in (10, 100_000))
    return {
        "utilisation_hetero": least(grid, "utilisation"),
        "stale_share": most(grid, "stale_share"),
        "mean_staleness_over_needed": most(grid, "over_needed"),
        "events_per_s_10": few.get("events_per_s"),
        "events_ratio_100k": many["events_per_s"] / few["events_per_s"] if few and many else None,
        "worst_event_ms_100k": many.get("worst_event_ms"),
        "bytes_per_node": many.get("bytes_per_node"),
        "false_claims_share": most(measured(FALSE_CLAIMS, rows), "liars_share"),
    }


def margin_of(scenario: Scenario) -> float:
    """Return the rollouts that the pool samples in time (fresh enough to be trained), as a multiple of what the learner
    needs.
    """
    demand = demand_of(scenario)
    return useful_rollouts(pool_of(scenario), demand) / demand.rollouts_per_step


def with_margin(margin: float, make: Callable[..., Scenario]) -> Scenario:
    """Choose the nodes' speed so that the pool samples `margin` times what the learner needs. `make(s_per_token=...)`
    makes the scenario.
    """
    fast, slow = S_PER_TOKEN / 64, 64 * S_PER_TOKEN
    while slow - fast > 1e-9:
        middle = (fast + slow) / 2
        fast, slow = (middle, slow) if margin_of(make(s_per_token=middle)) > margin else (fast, middle)
    return make(s_per_token=fast)


def scenario_of(seed: int, **sections: dict[str, Any]) -> Scenario:
    """Return the default scenario of the simulator with these settings and groups of `GROUP_SIZE`. The time in which
    versions spread to the nodes comes from a formula.
    """
    training = {"group_size": GROUP_SIZE, **sections.pop("training", {})}
    limit_s = LIMIT * training["steps"] * sections["learner"]["step_s"]
    measuring = {"limit_s": limit_s, **sections.pop("measuring", {})}
    fixed = {"run": {"seed": seed}, "publication": {"planned_nodes": 0}}
    return Scenario.model_validate({**fixed, "training": training, "measuring": measuring, **sections})


TOLD: Final = ("utilisation", "stale_share", "staleness", "over_needed")
GRID: Final = tuple(
    Case(
        name=f"grid, sigma {sigma:g}, S = {bound}, step {step_s:g} s",
        row=partial(_grid_row, sigma=sigma, max_staleness=bound, step_s=step_s),
        told=TOLD,
        seconds=1 + STEPS[step_s] * step_s * 0.02,
        lacks=grid_lacks(max_staleness=bound, step_s=step_s),
    )
    for sigma in SIGMAS
    for bound in STALENESS_BOUNDS
    for step_s in STEPS
)
FALSE_CLAIMS: Final = tuple(
    Case(
        name=f"false claims of {count} keys"
        + ("" if fresh_key_s == NEVER_S else f", each fresh after {fresh_key_s:g} s"),
        row=partial(_false_claims_row, count=count, fresh_key_s=fresh_key_s),
        told=(*TOLD, "liars_share"),
    )
    for count, fresh_key_s in ((10, NEVER_S), (3, 20.0), (10, 20.0))
)
"""Cases with the grid's pool (S = 2, steps of 5 s) and with hostile nodes, which claim a capacity of 4,096 rollouts and
return nothing. `count` hostile nodes exist at any moment; each gets a new key after `fresh_key_s`.
"""
SIZES_CASES: Final = tuple(
    Case(
        name=_size_name(nodes),
        row=partial(_size_row, nodes=nodes),
        told=(*TOLD, "events_per_s"),
        seconds=60.0 if nodes > 10_000 else 10.0,
    )
    for nodes in SIZES
)
