"""What is simulated: a grid of unequal pools that are just enough, pools of ever more nodes, and false claims.

In the grid the median node's rollouts take about 2 s, a version reaches everybody 0.8 s after its step, and the pool
samples in time 1.15 times what the learner takes, by the rule of `echo_hub.simulator.rule`. That sets the groups of a
step and, because these are whole, the last percent of the nodes' pace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.simulate.kind import Kind, Row
from benchmarks.simulate.simulated import row_of
from echo_hub.simulator.rule import demand_of, pool_of, useful_rollouts
from echo_hub.simulator.scenario import Scenario

MARGIN: Final = 1.15
"""What the pool of the grid samples in time, over what the learner takes."""
GROUP_SIZE: Final = 8
S_PER_TOKEN: Final = 0.02
"""Of the median node; a rollout has 100 tokens."""
SIGMAS: Final = (0.5, 1.0)
STALENESS_BOUNDS: Final = (1, 2, 4)
STEPS: Final = {1.0: 120, 5.0: 60, 15.0: 30, 60.0: 12}
"""Seconds a step takes, and how many are simulated: so many that a case takes seconds."""
SIZES: Final = {10: 1_000, 1_000: 25, 100_000: 5}
"""Nodes, and steps that are simulated."""
MOST_GROUPS: Final = 4096
"""More, no hub's config.toml may say."""
LIMIT: Final = 5
"""A run that takes so many times as long as its steps alone is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCase:
    """One pool of 100 nodes that is just enough."""

    sigma: float
    max_staleness: int
    step_s: float

    @property
    def name(self) -> str:
        return f"grid, sigma {self.sigma:g}, S = {self.max_staleness}, step {self.step_s:g} s"

    @property
    def seconds(self) -> float:
        """About, of one processor."""
        return 1 + STEPS[self.step_s] * self.step_s * 0.02

    @property
    def lacks(self) -> str:
        """Why no pool of such nodes is enough; empty: one is."""
        if margin_of(self._scenario(seed=0, sigma=0.0)) > 0:
            return ""
        return "no such pool is enough: S steps are over before a median node has a version and returns a rollout"

    def row(self, seed: int) -> Row:
        return row_of(self.name, self.scenario(seed))

    def scenario(self, seed: int) -> Scenario:
        one_group = margin_of(self._scenario(seed=seed, sigma=self.sigma))
        groups = max(1, int(one_group / MARGIN))
        return with_margin(MARGIN, partial(self._scenario, seed=seed, sigma=self.sigma, groups=groups))

    def _scenario(self, *, seed: int, sigma: float, groups: int = 1, s_per_token: float = S_PER_TOKEN) -> Scenario:
        return scenario_of(
            seed,
            training={
                "steps": STEPS[self.step_s],
                "groups_per_step": groups,
                "max_staleness": self.max_staleness,
            },
            learner={"step_s": self.step_s},
            nodes={"sigma": sigma, "s_per_token": s_per_token},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCase:
    """So many nodes, and half as many groups a step, as far as a hub may have them."""

    nodes: int

    @property
    def name(self) -> str:
        return f"{self.nodes:,} nodes"

    @property
    def seconds(self) -> float:
        return 60.0 if self.nodes > 10_000 else 10.0

    @property
    def lacks(self) -> str:
        return ""

    def row(self, seed: int) -> Row:
        return row_of(self.name, self.scenario(seed), with_memory=True)

    def scenario(self, seed: int) -> Scenario:
        return scenario_of(
            seed,
            training={"steps": SIZES[self.nodes], "groups_per_step": min(self.nodes // 2, MOST_GROUPS)},
            learner={"step_s": 15.0},
            nodes={"count": self.nodes},
            measuring={"warm_up_steps": 2},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseClaimsCase:
    """The grid's pool with S = 2 and steps of 5 s, and beside it keys that claim to hold 4,096 rollouts."""

    count: int
    """At any moment."""
    fresh_key_s: float
    """So often each is replaced by one that nobody knows."""

    @property
    def name(self) -> str:
        fresh = "" if self.fresh_key_s == NEVER_S else f", each fresh after {self.fresh_key_s:g} s"
        return f"false claims of {self.count} keys{fresh}"

    @property
    def seconds(self) -> float:
        return 10.0

    @property
    def lacks(self) -> str:
        return ""

    def row(self, seed: int) -> Row:
        return row_of(self.name, self.scenario(seed))

    def scenario(self, seed: int) -> Scenario:
        honest = GridCase(sigma=0.5, max_staleness=2, step_s=5.0).scenario(seed)
        claims = honest.false_claims.model_copy(update={"count": self.count, "fresh_key_s": self.fresh_key_s})
        return honest.model_copy(update={"false_claims": claims})


def grid_headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    grid = [rows[case.name] for case in GRID if case.name in rows]
    return {
        "utilisation_hetero": min((row["utilisation"] for row in grid), default=None),
        "stale_share": max((row["stale_share"] for row in grid), default=None),
        "mean_staleness_over_needed": max((row["over_needed"] for row in grid), default=None),
    }


def size_headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    few, _, many = (rows.get(case.name) for case in BY_SIZE)
    return {
        "events_per_s_10": few["events_per_s"] if few else None,
        "events_ratio_100k": many["events_per_s"] / few["events_per_s"] if few and many else None,
        "worst_event_ms_100k": many["worst_event_ms"] if many else None,
        "bytes_per_node": many["bytes_per_node"] if many else None,
    }


def false_claims_headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    shares = [rows[case.name]["liars_share"] for case in FALSE_CLAIMS if case.name in rows]
    return {"false_claims_share": max(shares, default=None)}


NEVER_S: Final = 1e9
GRID: Final = tuple(
    GridCase(sigma=sigma, max_staleness=bound, step_s=step_s)
    for sigma in SIGMAS
    for bound in STALENESS_BOUNDS
    for step_s in STEPS
)
BY_SIZE: Final = tuple(SizeCase(nodes=nodes) for nodes in SIZES)
FALSE_CLAIMS: Final = tuple(
    FalseClaimsCase(count=count, fresh_key_s=fresh_key_s)
    for count, fresh_key_s in ((10, NEVER_S), (3, 20.0), (10, 20.0))
)
TOLD: Final = ("utilisation", "stale_share", "staleness", "over_needed")

GRID_KIND: Final = Kind(cases=GRID, headline=grid_headline, told=TOLD, conditions={"useful_over_needed": MARGIN})
SIZES_KIND: Final = Kind(
    cases=BY_SIZE,
    headline=size_headline,
    told=(*TOLD, "events_per_s"),
    alone=True,
    conditions={
        "events": "processor time of the coordinator's calls alone; garbage collection is included, but what was "
        "there before the run, the simulated nodes among it, is frozen; details have the kinds of events",
        "bytes_per_node": "sys.getsizeof over all that the coordinator holds after the run's end",
    },
)
FALSE_CLAIMS_KIND: Final = Kind(cases=FALSE_CLAIMS, headline=false_claims_headline, told=(*TOLD, "liars_share"))


def margin_of(scenario: Scenario) -> float:
    """What the pool samples in time, over what the learner takes."""
    demand = demand_of(scenario)
    return useful_rollouts(pool_of(scenario), demand) / demand.rollouts_per_step


def with_margin(margin: float, make: Callable[..., Scenario]) -> Scenario:
    """The scenario whose pool samples that much in time, by the seconds that a token takes: `make(s_per_token=...)`."""
    fast, slow = S_PER_TOKEN / 64, 64 * S_PER_TOKEN
    while slow - fast > 1e-9:
        middle = (fast + slow) / 2
        fast, slow = (middle, slow) if margin_of(make(s_per_token=middle)) > margin else (fast, middle)
    return make(s_per_token=fast)


def scenario_of(seed: int, **sections: dict[str, Any]) -> Scenario:
    """The defaults, with groups of `GROUP_SIZE`, versions spread by the formula, and these settings."""
    training = {"group_size": GROUP_SIZE, **sections.pop("training", {})}
    limit_s = LIMIT * training["steps"] * sections["learner"]["step_s"]
    measuring = {"limit_s": limit_s, **sections.pop("measuring", {})}
    fixed = {"run": {"seed": seed}, "publication": {"planned_nodes": 0}}
    return Scenario.model_validate({**fixed, "training": training, "measuring": measuring, **sections})
