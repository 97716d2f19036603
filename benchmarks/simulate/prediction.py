"""Is a simulated learner as busy as the capacity model says of its scenario?

Pools of equal and of unequal nodes (throughput log-normal, sigma 0.5), staleness bounds S from 1 to 4, a version every
kappa steps, and throughputs from half to twice of what the learner takes: on both sides of the boundary. The model is
told the scenario's own figures (`echo_hub.simulator.rule`), so that no measuring comes in between. Rollouts take a
quarter of a step, and versions a fifth of the steps between two: where either takes much longer, the order of single
rollouts decides, which the model does not look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, Final

from benchmarks.simulate.kind import Kind
from echo_hub.core.capacity.model import Pool
from echo_hub.core.capacity.schedule import predict
from echo_hub.simulator.rule import classes_of, demand_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.simulation import simulate

STEP_S: Final = 10.0
ROLLOUT: Final = 0.25
"""Times a step that the median node takes for a rollout."""
BROADCAST: Final = 0.2
"""Times the steps between two versions."""
TOKENS: Final = 100
NODES: Final = 20
WIDTH: Final = 4
GROUP_SIZE: Final = 4
STEPS: Final = 36
WARM_UP_STEPS: Final = 12
SETTINGS: Final = ((1, 1), (2, 1), (2, 2), (3, 2), (4, 1), (4, 4))
"""S and kappa."""
SIGMAS: Final = (0.0, 0.5)
THROUGHPUTS: Final = (0.5, 0.8, 0.95, 1.25, 2.0)
"""Over what the learner takes."""
TOLD: Final = ("utilisation", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionCase:
    """One scenario."""

    max_staleness: int
    publish_every: int
    sigma: float
    throughput: float

    @property
    def name(self) -> str:
        settings = f"S = {self.max_staleness}, every {self.publish_every}"
        return f"prediction, {settings}, sigma {self.sigma:g}, throughput {self.throughput:g}"

    @property
    def seconds(self) -> float:
        """About, of one processor."""
        return 1.5

    @property
    def lacks(self) -> str:
        return ""

    def scenario(self, seed: int) -> Scenario:
        rollout_s = ROLLOUT * STEP_S
        rollouts = NODES * WIDTH / rollout_s * STEP_S / self.throughput
        return Scenario.model_validate(
            {
                "run": {"seed": seed},
                "training": {
                    "steps": STEPS,
                    "groups_per_step": round(rollouts / GROUP_SIZE),
                    "group_size": GROUP_SIZE,
                    "max_staleness": self.max_staleness,
                    "publish_every": self.publish_every,
                },
                "learner": {"step_s": STEP_S},
                "publication": {"start_s": BROADCAST * self.publish_every * STEP_S, "payload_bytes": 0},
                "nodes": {"count": NODES, "width": WIDTH, "sigma": self.sigma, "s_per_token": rollout_s / TOKENS},
                "lengths": {"tokens": TOKENS},
                "measuring": {"warm_up_steps": WARM_UP_STEPS, "limit_s": 10 * STEPS * STEP_S},
            }
        )

    def row(self, seed: int) -> dict[str, Any]:
        scenario = self.scenario(seed)
        found = simulate(scenario, lambda: 0.0)
        predicted = predict(demand_of(scenario), Pool.of(classes_of(scenario)))
        return {"utilisation": found.utilisation, "predicted": predicted.utilisation, "stale_share": found.stale_share}


@cache
def cases() -> tuple[PredictionCase, ...]:
    return tuple(
        PredictionCase(max_staleness=bound, publish_every=every, sigma=sigma, throughput=throughput)
        for bound, every in SETTINGS
        for sigma in SIGMAS
        for throughput in THROUGHPUTS
    )


def headline(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Of the rows by their cases' names: the largest error and the mean one."""
    errors = [
        abs(rows[case.name]["predicted"] - rows[case.name]["utilisation"]) for case in cases() if case.name in rows
    ]
    return {
        "prediction_error": max(errors, default=None),
        "mean_prediction_error": fmean(errors) if errors else None,
    }


KIND: Final = Kind(cases=cases(), headline=headline, told=TOLD)
