"""Real runs with pools of nodes around the needed size: is the learner as busy as the capacity model predicts?

Hub and nodes are processes in separate network namespaces with shaped links. Learner and engines are real, but training
steps and tokens last a known time (`paced_learner`, `paced_node`). A slot is one rollout in a node's batch. The number
of slots is chosen so that the pool's throughput is about `over` times what the learner needs by the capacity model.
`pool_over_needed` is the ratio that was reached. This ratio and the prediction come from the run's database
(`echo_hub.views.pace`). With the links `SLOW`, sending a version takes longer than a training step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.capacity.paced_engine import TOKEN_S
from benchmarks.capacity.paced_learner import STEP_S
from benchmarks.dissemination.links import HUB, LinkSet, lacking, open_links, remove_leftovers
from benchmarks.harness import hub_with_learner
from benchmarks.harness.engine import lacks
from benchmarks.harness.hub_with_learner import LEARNER
from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.site import RunFailed, Settings, hub_process, merged, newest_step, node_process, wait_until
from echo_hub.config.file import load_config
from echo_hub.core.capacity.advice import times_as_many
from echo_hub.core.capacity.model import Mode, NodeClass, Pool, Workload
from echo_hub.core.capacity.schedule import predict
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_hub.views.learner_time import learner_time
from echo_hub.views.pace import RunPace, newest_steps, read_pace
from echo_shared.records.run import StepRecord

WARM_UP: Final = 4
"""Number of first steps that are not measured: during them, nodes earn trust and the hub learns their speed."""
STEPS: Final = 13
"""Training steps of a run, including the WARM_UP steps that are not measured."""
STEP_WITHIN_S: Final = 25.0
"""Maximum mean seconds per step; a run that takes longer counts as stalled."""
NODES: Final = 2
LEAST_TOKEN_S: Final = 0.1
LEAST_STEP_S: Final = 2.0
FAST: Final = LinkSet(hub_up=20, node_down=50, node_up=10)
SLOW: Final = LinkSet(hub_up=7, node_down=50, node_up=10)
ENOUGH: Final = 1.2
SECONDS: Final = 45.0

SETTINGS: Final[Settings] = {
    "sampling": {"max_tokens": 6},
    "training": {"steps": 1000, "groups_per_step": 16, "group_size": 8, "lora_rank": 32, "learning_rate": 5e-5},
    "learner": {"threads": 1, "checkpoint_every": 50},
    "evaluation": {"problems": 1},
    "dissemination": {"way": "inline", "delta_reach": 0},  # Without deltas, every version has the same size.
}
ASSUMED: Final = Workload(mode="async", rollouts_per_step=128, train_s=LEAST_STEP_S, hand_off_s=0.05, broadcast_s=0.9)
"""The capacity model's assumptions about training steps, with versions sent over the hub's uplink of `FAST`."""
OF_SLOT: Final = NodeClass(name="slot", count=1, rollouts_per_s=2.5, latency_s=0.7)
"""The capacity model's assumptions about a slot (one rollout in a node's batch) at this benchmark's time per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One real run. A sequential run gets as many slots (rollouts that the nodes sample at the same time) as the
    asynchronous run with otherwise equal fields.
    """

    over: float
    """Throughput of the pool, as a multiple of what the learner needs by the capacity model."""
    max_staleness: int
    publish_every: int = 1
    mode: Mode = "async"
    links: LinkSet = FAST

    @property
    def name(self) -> str:
        every = f", every {self.publish_every}" if self.publish_every > 1 else ""
        how = f"S = {self.max_staleness}{every}" if self.mode == "async" else self.mode
        return f"real run, {how}, pool {self.over:g}"

    @property
    def slots(self) -> int:
        """Number of rollouts that both nodes together sample at the same time."""
        workload = replace(
            ASSUMED,
            max_staleness=self.max_staleness,
            publish_every=self.publish_every,
            broadcast_s=ASSUMED.broadcast_s * FAST.hub_up / self.links.hub_up,
        )
        needed = times_as_many(workload, (OF_SLOT,), 1.0)
        assert needed is not None, "some pool is enough for these times"
        return max(NODES, round(needed * self.over))

    def settings(self, seed: int) -> dict[str, dict[str, Any]]:
        own: dict[str, dict[str, Any]] = {
            "run": {"name": "capacity", "mode": self.mode, "seed": seed},
            "training": {"max_staleness": self.max_staleness, "publish_every": self.publish_every},
        }
        return merged(SETTINGS, own)


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


def plan() -> list[Planned]:
    missing = lacks("llama_cpp", "f32") or lacking()
    return [Planned(name=case.name, seconds=SECONDS, lacks=missing) for case in CASES]


def measure(progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    wanted = [case for case in CASES if progress.wants(case.name)]
    if wanted:
        remove_leftovers()
    rows = []
    for case in wanted:
        try:
            with tempfile.TemporaryDirectory(prefix="echo-capacity-") as directory:
                steps, pace = run(case.settings(seed), case.slots, case.links, Path(directory))
        except RunFailed as error:
            progress.leave_out(case.name, str(error))
            continue
        rows.append(figures(case, steps, pace))
        told = ("pool_over_needed", "utilisation", "predicted")
        progress.done(case.name, {name: rows[-1][name] for name in told})
    return rows


def run(
    settings: Settings, slots: int, links: LinkSet, directory: Path, *, num_steps: int = STEPS
) -> tuple[Sequence[StepRecord], RunPace]:
    """Train `num_steps` steps. Return the steps, and the run's pace (what its learner consumed and its nodes supplied)
    from its database. Raises RunFailed.
    """
    run_directory = RunDirectory(directory / "run")
    with open_links(NODES, links) as net, ExitStack() as processes:
        config = load_config(None, {**settings, "server": {"host": net.address(HUB), "port": 0}})
        make_run(run_directory, config)
        learner = {LEARNER: "benchmarks.capacity.paced_learner", STEP_S: str(LEAST_STEP_S)}
        hub, url = processes.enter_context(
            hub_process(
                run_directory.root,
                directory / "hub.log",
                module=hub_with_learner.MODULE,
                within=net.command(HUB),
                env=learner,
            )
        )
        nodes = [
            processes.enter_context(
                node_process(
                    url,
                    directory / f"node{number}",
                    ["--insecure", "--backend", "llama_cpp", "--width", str((slots + number - 1) // NODES)],
                    module="benchmarks.capacity.paced_node",
                    within=net.command(number),
                    env={TOKEN_S: str(LEAST_TOKEN_S)},
                )
            )
            for number in range(1, 1 + NODES)
        ]
        wait_until(
            lambda: newest_step(run_directory.root) >= num_steps,
            processes=[hub, *nodes],
            within_s=num_steps * STEP_WITHIN_S,
            where=directory,
        )
    store = Store.open(run_directory.database_url)
    try:
        steps = newest_steps(store)
        pace = read_pace(store, config, steps, None)
    finally:
        store.close()
    assert pace is not None, "there are steps"
    return steps, pace


def figures(case: Case, steps: Sequence[StepRecord], pace: RunPace) -> dict[str, Any]:
    workload, nodes, counted = pace.workload, pace.nodes, steps[WARM_UP - 1 : STEPS]
    spent = learner_time(counted, started_at=counted[0].trained_at)
    assert spent is not None, "there are steps"
    expected, times = predict(workload, Pool.of(nodes)), times_as_many(workload, nodes, 1.0)
    return {
        "case": case.name,
        "slots": case.slots,
        "pool_over_needed": 1 / times if times else None,
        "train_s": workload.train_s,
        "broadcast_s": workload.broadcast_s,
        "period_s": (counted[-1].trained_at - counted[0].trained_at) / (len(counted) - 1),
        "predicted_period_s": expected.period_s,
        "utilisation": spent.training,
        "predicted": expected.utilisation,
    }


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the main figures. `max_prediction_error` is the largest error of all runs. The figures `..._when_enough`
    are the minimum over asynchronous runs whose pool is `ENOUGH` times the need. Each other figure comes from one or
    two cases.
    """
    by_name = {row["case"]: row for row in rows}
    asynchronous, sequential = by_name.get(ASYNC.name), by_name.get(SEQUENTIAL.name)
    names = {case.name for case in CASES if case.over == ENOUGH and case.mode == "async"}
    enough = [row for row in rows if row["case"] in names]
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
