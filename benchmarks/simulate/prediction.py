"""The capacity model's prediction, compared with the utilisation of a simulated learner.

Pools of equal and of unequal nodes (throughput log-normal, sigma 0.5), staleness bounds S from 1 to 4, a version every
kappa steps, and throughputs from half to twice what the learner needs: both sides of the boundary. The model gets the
scenario's own figures (`echo_hub.simulator.rule`), so that no measurement comes in between. Rollouts take a quarter of
a step, and versions a fifth of the steps between two versions. Where either takes much longer, the order of single
rollouts decides, which the model does not describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchmarks.simulate.kind import Case, Kind, Row
from echo_hub.core.capacity.model import Pool
from echo_hub.core.capacity.schedule import predict
from echo_hub.simulator.rule import classes_of, demand_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.simulation import simulate

STEP_S: Final = 10.0
ROLLOUT: Final = 0.25
"""Time of the median node's rollout, in steps."""
BROADCAST: Final = 0.2
"""Time of a version's spread, in steps between two versions."""
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
"""Over what the learner needs."""


@dataclass(frozen=True, kw_only=True)
class PredictionCase(Case):
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
        return 1.5

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

    def row(self, seed: int) -> Row:
        scenario = self.scenario(seed)
        found = simulate(scenario, lambda: 0.0)
        predicted = predict(demand_of(scenario), Pool.of(classes_of(scenario)))
        return {"utilisation": found.utilisation, "predicted": predicted.utilisation, "stale_share": found.stale_share}


def headline(rows: Mapping[str, Row]) -> dict[str, float | None]:
    """Return the largest error and the mean error."""
    errors = [abs(row["predicted"] - row["utilisation"]) for row in KIND.rows(rows)]
    return {
        "prediction_error": max(errors, default=None),
        "mean_prediction_error": fmean(errors) if errors else None,
    }


CASES: Final = tuple(
    PredictionCase(max_staleness=bound, publish_every=every, sigma=sigma, throughput=throughput)
    for bound, every in SETTINGS
    for sigma in SIGMAS
    for throughput in THROUGHPUTS
)
KIND: Final = Kind(cases=CASES, headline=headline, told=("utilisation", "predicted"))
