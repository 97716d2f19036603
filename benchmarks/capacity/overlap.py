"""Real runs on both sides of the boundary: is the learner as busy as the capacity model predicts?

Each case is a real hub with real nodes (`real_run`). Each case fixes the least token time, the least step time and the
hub's uplink. The number of slots is chosen so that the pool's throughput is `over` times what the model says is needed:
by the learner's time in the previous run, and by a slot's throughput in the first run. `pool_over_needed` is the real
ratio, by the run's own database, which also gives the prediction (`echo_hub.views.pace`). Over the uplink of `SLOW`, a
version takes longer than a step."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.backends.cases import lacks
from benchmarks.capacity.real_run import Books, Fleet, run
from benchmarks.dissemination.links import LinkSet, can_shape, remove_leftovers
from benchmarks.harness.processes import RunFailed
from benchmarks.harness.progress import Planned, Progress
from echo_hub.core.capacity.advice import times_as_many
from echo_hub.core.capacity.model import Mode, NodeClass, Pool, Workload
from echo_hub.core.capacity.schedule import predict
from echo_hub.views.learner_time import learner_time
from echo_hub.views.pace import Pace

WARM_UP: Final = 4
"""Steps that are left out, in which nodes earn trust and the hub learns their pace."""
STEPS: Final = 13
"""Steps of a run, warm-up included."""
TOKEN_S: Final = 0.1
STEP_S: Final = 2.0
FAST: Final = LinkSet(hub_up=20, node_down=50, node_up=10)
SLOW: Final = LinkSet(hub_up=7, node_down=50, node_up=10)
ENOUGH: Final = 1.2
SECONDS: Final = 45.0
"""Expected time of one case."""

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sampling": {"max_tokens": 6},
    "training": {"steps": 1000, "groups_per_step": 16, "group_size": 8, "lora_rank": 32, "learning_rate": 5e-5},
    "learner": {"threads": 1, "checkpoint_every": 50},
    "evaluation": {"problems": 1},
    "dissemination": {"way": "inline", "delta_reach": 0},  # Every version is as large as the others.
}

SLOTS_SEEN: Final = 32
SEEN: Final = Pace(
    workload=Workload(mode="async", rollouts_per_step=128, train_s=STEP_S, hand_off_s=0.05, broadcast_s=0.9),
    nodes=(NodeClass(name="both", count=1, rollouts_per_s=SLOTS_SEEN * 2.5, latency_s=0.7),),
    kinds=(),
)
"""Assumed pace for the first run, with `SLOTS_SEEN` slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. A sequential run has the pool of the asynchronous run with the same numbers."""

    over: float
    """The pool, in multiples of what the capacity model says is needed."""
    max_staleness: int
    publish_every: int = 1
    mode: Mode = "async"
    links: LinkSet = FAST

    @property
    def name(self) -> str:
        every = f", every {self.publish_every}" if self.publish_every > 1 else ""
        how = f"S = {self.max_staleness}{every}" if self.mode == "async" else self.mode
        return f"real run, {how}, pool {self.over:g}"

    def settings(self, seed: int) -> dict[str, dict[str, Any]]:
        """Sections of the run's configuration."""
        training = {"max_staleness": self.max_staleness, "publish_every": self.publish_every}
        own = {"run": {"name": "capacity", "mode": self.mode, "seed": seed}}
        return {
            **{name: dict(section) for name, section in SETTINGS.items()},
            **own,
            "training": {**SETTINGS["training"], **training},
        }


ASYNC: Final = Case(over=ENOUGH, max_staleness=2)
SEQUENTIAL: Final = replace(ASYNC, mode="sequential")
KAPPA_2: Final = Case(over=ENOUGH, max_staleness=3, publish_every=2, links=SLOW)
CASES: Final = (
    Case(over=0.7, max_staleness=2),
    Case(over=1.0, max_staleness=2),
    ASYNC,
    SEQUENTIAL,
    KAPPA_2,
    Case(over=ENOUGH, max_staleness=1),
    Case(over=0.8, max_staleness=1),
)


ENOUGH_CASES: Final = tuple(case.name for case in CASES if case.over == ENOUGH and case.mode == "async")


class Sizing:
    """Chooses the number of slots by the pace of earlier runs."""

    def __init__(self) -> None:
        self._workload, self._nodes, self._slots = SEEN.workload, SEEN.nodes, SLOTS_SEEN
        self._uplink = FAST.hub_up
        self._has_seen = False
        self._sized: dict[tuple[float, int, int], int] = {}

    def slots(self, case: Case) -> int:
        """Slots of both nodes together, equal for equal pools. Raises RunFailed if no number is enough."""
        workload = replace(
            self._workload,
            mode="async",
            max_staleness=case.max_staleness,
            publish_every=case.publish_every,
            broadcast_s=self._workload.broadcast_s * self._uplink / case.links.hub_up,
        )
        pool = (case.over, case.max_staleness, case.publish_every)
        if pool not in self._sized:
            times = times_as_many(workload, self._nodes, 1.0)
            if times is None:
                raise RunFailed(f"no pool is enough for versions that take {workload.broadcast_s:.2g} s")
            self._sized[pool] = max(2, round(self._slots * times * case.over))
        return self._sized[pool]

    def see(self, case: Case, slots: int, pace: Pace) -> None:
        """Learn from a run. Only the first run shows a slot's throughput: its pool is too small, so no slot idles."""
        self._workload, self._uplink = pace.workload, case.links.hub_up
        if not self._has_seen:
            self._nodes, self._slots, self._has_seen = pace.nodes, slots, True


def plan() -> list[Planned]:
    missing = lacks("llama_cpp", "f32") or ("" if can_shape() else "root and iproute2, for shaped links")
    return [Planned(name=case.name, seconds=SECONDS, lacks=missing) for case in CASES]


def measure(progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    if any(progress.wants(case.name) for case in CASES):
        remove_leftovers()
    rows, sizing = [], Sizing()
    for case in CASES:
        if not progress.wants(case.name):
            continue
        try:
            slots = sizing.slots(case)
            with tempfile.TemporaryDirectory(prefix="echo-capacity-") as directory:
                fleet = Fleet(slots=slots, token_s=TOKEN_S, step_s=STEP_S)
                books = run(case.settings(seed), fleet, case.links, Path(directory), num_steps=STEPS)
        except RunFailed as error:
            progress.leave_out(case.name, str(error))
            continue
        sizing.see(case, slots, books.pace)
        rows.append(figures(case, slots, books))
        told = ("pool_over_needed", "utilisation", "predicted")
        progress.done(case.name, {name: rows[-1][name] for name in told})
    return rows


def figures(case: Case, slots: int, books: Books) -> dict[str, Any]:
    """Measured and predicted figures of a run."""
    workload, nodes, steps = books.pace.workload, books.pace.nodes, books.steps[WARM_UP - 1 : STEPS]
    spent = learner_time(steps, started_at=steps[0].trained_at)
    assert spent is not None  # There are steps.
    expected, times = predict(workload, Pool.of(nodes)), times_as_many(workload, nodes, 1.0)
    return {
        "case": case.name,
        "slots": slots,
        "pool_over_needed": 1 / times if times else None,
        "train_s": workload.train_s,
        "hand_off_s": workload.hand_off_s,
        "broadcast_s": workload.broadcast_s,
        "rollouts_per_s": expected.rollouts_per_s,
        "latency_s": max(node.latency_s for node in nodes),
        "period_s": (steps[-1].trained_at - steps[0].trained_at) / (len(steps) - 1),
        "predicted_period_s": expected.period_s,
        "utilisation": spent.training,
        "predicted": expected.utilisation,
        "waits_for_rollouts": spent.idle["rollouts"],
    }


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """`max_prediction_error` is over all runs; `..._when_enough` takes the minimum over asynchronous runs whose pool is
    `ENOUGH`; each other figure is of one case or of two cases."""
    by_name = {row["case"]: row for row in rows}
    asynchronous, sequential = by_name.get(ASYNC.name), by_name.get(SEQUENTIAL.name)
    enough = [row for row in rows if row["case"] in ENOUGH_CASES]
    kappa_2 = by_name.get(KAPPA_2.name, {})

    def speedup(name: str) -> float | None:
        return sequential[name] / asynchronous[name] if sequential and asynchronous else None

    return {
        "utilisation_when_enough": min((row["utilisation"] for row in enough), default=None),
        "pool_when_enough": min((row["pool_over_needed"] for row in enough), default=None),
        "max_prediction_error": max((abs(row["predicted"] - row["utilisation"]) for row in rows), default=None),
        "async_speedup": speedup("period_s"),
        "async_speedup_model": speedup("predicted_period_s"),
        "kappa_2_utilisation": kappa_2.get("utilisation"),
        "kappa_2_predicted": kappa_2.get("predicted"),
    }
