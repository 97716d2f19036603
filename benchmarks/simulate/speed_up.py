"""How much sooner a step ends than with a plain dispatch, where sampling is the bottleneck and lengths differ 1:30.

Every dispatch simulates the same scenario with the same seed. A pool of 100 nodes samples .7 of what the learner needs
(`echo_hub.simulator.rule`). A node draws a whole group of 8 at once, which favours the baseline. Prompts recur every
few steps, and prompts explain .7 of the variance of lengths.

    s_per_step      virtual seconds from one trained step to the next, after the warm-up
    speed_up        the baseline's s_per_step over the hub's
    ..._spread      over the hub's without knowledge of prompts that come again: all are expected to be equally long
    ..._lengths     over that of whole groups, the longest first, to the fastest nodes
    ..._apart       over that of members apart, one at a time, in order: a group then waits for the slowest of eight
                    nodes instead of one
    tokens_trained  the mean completion that was trained on; those of the task have `tokens`

A dispatch without knowledge of lengths trains on shorter completions: it drops the long ones as late. Its steps are
shorter for that, so compare `s_per_step` together with `tokens_trained`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from benchmarks.simulate.cases import GROUP_SIZE, scenario_of, with_margin
from benchmarks.simulate.kind import Case, Kind, Row, check, least, most
from benchmarks.simulate.plain_dispatch import plain
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import Effect
from echo_hub.core.events import Event, GroupPrepared
from echo_hub.simulator.report import report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import MakeCoordinator, World

MARGIN: Final = 0.7
STEPS: Final = 40
WARM_UP_STEPS: Final = 10


class Unaware(Coordinator):
    """The hub's coordinator without knowledge of prompts that come again."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, GroupPrepared):
            event = GroupPrepared(group_id=event.group_id, seed=event.seed, prompt_tokens=event.prompt_tokens)
        return super().handle(event, now)


DISPATCHES: Final[Mapping[str, MakeCoordinator]] = {
    "baseline": plain(spread=False, aware=False),
    "hub": Coordinator,
    "spread": Unaware,
    "lengths": plain(spread=False, aware=True),
    "apart": plain(spread=True, aware=False),
}


@dataclass(frozen=True, kw_only=True)
class SpeedUpCase(Case):
    """One pool of 100 nodes that is not enough."""

    sigma: float
    max_staleness: int

    @property
    def name(self) -> str:
        return f"speed-up, sigma {self.sigma:g}, S = {self.max_staleness}"

    @property
    def seconds(self) -> float:
        return 20.0

    def row(self, seed: int) -> Row:
        scenario = self.scenario(seed)
        worlds = {name: World(scenario, make=make) for name, make in DISPATCHES.items()}
        for name, world in worlds.items():
            world.run()
            check(f"{self.name}, {name}", report_of(world))
        s_per_step = {name: seconds_per_step(world) for name, world in worlds.items()}
        tokens = {name: world.accounts.tokens / max(1, world.accounts.planned) for name, world in worlds.items()}
        speed_up = {name: s_per_step["baseline"] / seconds for name, seconds in s_per_step.items()}
        return {
            "s_per_step": s_per_step["hub"],
            "baseline_s_per_step": s_per_step["baseline"],
            "speed_up": speed_up["hub"],
            **{f"speed_up_{name}": speed_up[name] for name in ("spread", "lengths", "apart")},
            "tokens": worlds["hub"].fleet.lengths.mean,
            "tokens_trained": tokens["hub"],
            **{f"tokens_trained_{name}": tokens[name] for name in ("baseline", "spread")},
            "details": {name: asdict(report_of(world)) for name, world in worlds.items()},
        }

    def scenario(self, seed: int) -> Scenario:
        return with_margin(MARGIN, partial(self._scenario, seed))

    def _scenario(self, seed: int, *, s_per_token: float) -> Scenario:
        return scenario_of(
            seed,
            training={"steps": STEPS, "groups_per_step": 48, "max_staleness": self.max_staleness},
            learner={"step_s": 6.0},
            nodes={"sigma": self.sigma, "width": GROUP_SIZE, "s_per_token": s_per_token},
            lengths={"ratio": 30.0, "prompts": 200},
            measuring={"warm_up_steps": WARM_UP_STEPS},
        )


def seconds_per_step(world: World) -> float:
    """Virtual seconds from one trained step to the next, after the warm-up; infinite if there is no such step."""
    warm_up = world.scenario.measuring.warm_up_steps
    ends = [end for _, end in world.steps if end <= world.agenda.now]
    if len(ends) <= warm_up:
        return float("inf")
    return ((ends[-1] if world.finished else world.agenda.now) - ends[warm_up - 1]) / (len(ends) - warm_up)


def headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Return the least and the largest speed-up of all cases."""
    found = KIND.rows(rows)
    return {"speed_up": least(found, "speed_up"), "speed_up_most": most(found, "speed_up")}


CASES: Final = tuple(SpeedUpCase(sigma=sigma, max_staleness=bound) for sigma in (0.5, 1.0) for bound in (1, 2))
KIND: Final = Kind(
    cases=CASES,
    headline=headline,
    told=("s_per_step", "speed_up", "speed_up_spread", "speed_up_lengths", "speed_up_apart", "tokens_trained"),
    conditions={"speed_up_useful_over_needed": MARGIN},
)
