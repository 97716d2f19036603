"""A grid of unequal pools that are just enough, pools of ever more nodes, and false claims.

In the grid, the median node's rollouts take about 2 s, and a version reaches all nodes 0.8 s after its step. The pool
samples 1.15 times what the learner needs (`echo_hub.simulator.rule`). This fixes the number of groups per step. As
groups are whole, the nodes' speed is then adjusted slightly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from echo_hub.driving.garbage import Garbage
from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.rule import demand_of, pool_of, useful_rollouts
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World

Row = dict[str, Any]
"""A case's line of the table. Its `details`, if any, go into the conditions instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case, which is pickled and measured in a separate process."""

    name: str
    row: Callable[[int], Row]
    seconds: float = 10.0
    lacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    cases: tuple[Case, ...]
    headline: Callable[[Mapping[str, Row]], dict[str, Any]]
    """Computes the headline figures from the measured rows, by case name. Figures of cases that were not measured are
    None.
    """
    told: tuple[str, ...]
    """Figures of a row that are printed once it is measured."""
    alone: bool = False
    """True if processor time is measured, so that no other case may run at the same time."""
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, measured: Mapping[str, Row]) -> list[Row]:
        return [measured[case.name] for case in self.cases if case.name in measured]


def simulated(scenario: Scenario, *, with_memory: bool = False) -> Row:
    """Simulate one scenario, with the processor time of this process and the hub's garbage collection."""
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


def least(rows: Iterable[Row], figure: str) -> Any:
    return min((row[figure] for row in rows), default=None)


def most(rows: Iterable[Row], figure: str) -> Any:
    return max((row[figure] for row in rows), default=None)


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
"""Time limit of a run, as a multiple of the duration of all its steps without waits."""
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


def _grid_case(sigma: float, max_staleness: int, step_s: float) -> Case:
    return Case(
        name=f"grid, sigma {sigma:g}, S = {max_staleness}, step {step_s:g} s",
        row=partial(_grid_row, sigma=sigma, max_staleness=max_staleness, step_s=step_s),
        seconds=1 + STEPS[step_s] * step_s * 0.02,
        lacks=grid_lacks(max_staleness=max_staleness, step_s=step_s),
    )


def _size_row(seed: int, *, nodes: int) -> Row:
    """Simulate half as many groups per step as nodes, up to the hub's limit."""
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


def _false_claims_case(count: int, fresh_key_s: float) -> Case:
    """Make a case of the grid's pool with S = 2 and steps of 5 s, and with keys that claim a capacity of 4,096
    rollouts. `count` such keys exist at any moment; a new key replaces each one after `fresh_key_s`.
    """
    fresh = "" if fresh_key_s == NEVER_S else f", each fresh after {fresh_key_s:g} s"
    name = f"false claims of {count} keys{fresh}"
    return Case(name=name, row=partial(_false_claims_row, count=count, fresh_key_s=fresh_key_s))


def grid_headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    grid = GRID_KIND.rows(rows)
    return {
        "utilisation_hetero": least(grid, "utilisation"),
        "stale_share": most(grid, "stale_share"),
        "mean_staleness_over_needed": most(grid, "over_needed"),
    }


def size_headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    few, many = (rows.get(_size_name(nodes)) for nodes in (10, 100_000))
    return {
        "events_per_s_10": few["events_per_s"] if few else None,
        "events_ratio_100k": many["events_per_s"] / few["events_per_s"] if few and many else None,
        "worst_event_ms_100k": many["worst_event_ms"] if many else None,
        "bytes_per_node": many["bytes_per_node"] if many else None,
    }


def false_claims_headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    return {"false_claims_share": most(FALSE_CLAIMS_KIND.rows(rows), "liars_share")}


def margin_of(scenario: Scenario) -> float:
    """Return the rollouts that the pool samples in time (fresh enough to be trained), as a multiple of what the learner
    needs.
    """
    demand = demand_of(scenario)
    return useful_rollouts(pool_of(scenario), demand) / demand.rollouts_per_step


def with_margin(margin: float, make: Callable[..., Scenario]) -> Scenario:
    """Choose node speeds that give the pool this margin. Calls `make(s_per_token=...)`."""
    fast, slow = S_PER_TOKEN / 64, 64 * S_PER_TOKEN
    while slow - fast > 1e-9:
        middle = (fast + slow) / 2
        fast, slow = (middle, slow) if margin_of(make(s_per_token=middle)) > margin else (fast, middle)
    return make(s_per_token=fast)


def scenario_of(seed: int, **sections: dict[str, Any]) -> Scenario:
    """Return the defaults with these settings and groups of `GROUP_SIZE`; a formula gives the time in which versions
    spread.
    """
    training = {"group_size": GROUP_SIZE, **sections.pop("training", {})}
    limit_s = LIMIT * training["steps"] * sections["learner"]["step_s"]
    measuring = {"limit_s": limit_s, **sections.pop("measuring", {})}
    fixed = {"run": {"seed": seed}, "publication": {"planned_nodes": 0}}
    return Scenario.model_validate({**fixed, "training": training, "measuring": measuring, **sections})


TOLD: Final = ("utilisation", "stale_share", "staleness", "over_needed")
GRID: Final = tuple(
    _grid_case(sigma, bound, step_s) for sigma in SIGMAS for bound in STALENESS_BOUNDS for step_s in STEPS
)
FALSE_CLAIMS: Final = (_false_claims_case(10, NEVER_S), _false_claims_case(3, 20.0), _false_claims_case(10, 20.0))
GRID_KIND: Final = Kind(cases=GRID, headline=grid_headline, told=TOLD, conditions={"useful_over_needed": MARGIN})
SIZES_KIND: Final = Kind(
    cases=tuple(
        Case(name=_size_name(nodes), row=partial(_size_row, nodes=nodes), seconds=60.0 if nodes > 10_000 else 10.0)
        for nodes in SIZES
    ),
    headline=size_headline,
    told=(*TOLD, "events_per_s"),
    alone=True,
    conditions={
        "events": "processor time of the coordinator's calls alone; garbage collection is included, but objects from "
        "before the run, such as the simulated nodes, are frozen; details have the kinds of events",
        "bytes_per_node": "sys.getsizeof of all that the coordinator holds after the end of the run",
    },
)
FALSE_CLAIMS_KIND: Final = Kind(
    cases=FALSE_CLAIMS,
    headline=false_claims_headline,
    told=(*TOLD, "liars_share"),
)
