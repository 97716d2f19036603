"""One run in virtual time. The simulator does real work: problems, sampler and learner are the hub's own.

Nodes take no time: a lease is sampled immediately with its named version, while a training step takes one second. So
from step S + 1 on, a run with staleness bound S trains on rollouts that are exactly S steps old, which is the worst
case.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Final, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.engine import SamplingEngine
from benchmarks.harness.site import Settings, merged
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import RolloutReceived, RolloutsDropped, ScoreRecorded, SendLease, StepPlanned
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.preparing import prepare
from echo_hub.scoring.problems import Problems
from echo_hub.serving.core_settings import coordinator_settings, trained_tasks
from echo_hub.simulator.node import Sampling
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.work import Record
from echo_hub.simulator.world import World
from echo_hub.training.trainer import arrived
from echo_shared.records.rollout import RolloutPayload
from echo_shared.sampling import torch_sampler
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import rollout_id

OF_ALL: Final[Settings] = {
    "run": {"mode": "colocated"},
    "sampling": {"max_tokens": 6},
    "learner": {"threads": 1, "device": "cpu"},
    "trust": {"verifier": "off"},  # All nodes are honest: the learner's own policy, or engines of this process.
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A configuration for training, which is run once per seed."""

    sizes: ClassVar[Settings] = {
        "training": {"steps": 60, "groups_per_step": 32, "group_size": 8},
        "evaluation": {"problems": 1024},
    }
    name: str
    settings: Settings = field(default_factory=dict)
    """Sections of a config.toml whose values differ from those common to all cases."""

    def config(self, seed: int) -> HubConfig:
        """Return the configuration of a run. Raises ValueError for invalid settings."""
        sections = merged(merged(OF_ALL, self.sizes), self.settings)
        return HubConfig.model_validate(merged(sections, {"run": {"seed": seed}}))


def stale(bound: int, **settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of an asynchronous run that trains on rollouts exactly `bound` steps old."""
    return {"run": {"mode": "async"}, **settings, "training": {"max_staleness": bound, **settings.get("training", {})}}


COLOCATED: Final = Case(name="colocated")
SEQUENTIAL: Final = Case(name="sequential", settings={"run": {"mode": "sequential"}})
BY_STALENESS: Final = {bound: Case(name=f"async S={bound}", settings=stale(bound)) for bound in (1, 2, 4, 8)}
CORRECTED_8: Final = (
    Case(name="AIPO S=8", settings=stale(8, objective={"name": "aipo"})),
    Case(name="decoupled PPO S=8", settings=stale(8, objective={"name": "decoupled_ppo"})),
)
UNCORRECTED_8: Final = Case(
    name="GRPO without ratio S=8", settings=stale(8, objective={"name": "grpo", "old_policy": "proximal"})
)
ALL: Final = (COLOCATED, SEQUENTIAL, *BY_STALENESS.values(), *CORRECTED_8, UNCORRECTED_8)

FLEET: Final = tuple(
    Case(
        name=f"a real fleet, S={bound}",
        settings=stale(
            bound,
            model={"base": "builtin:small"},
            task={"name": "worked", "options": {"operations": ["+", "*"]}},
            sampling={"max_tokens": 320},
            training={"steps": 30, "groups_per_step": 12, "group_size": 4},
            evaluation={"problems": 128},
        ),
    )
    for bound in (1, 4)
)
"""Cases in which the nodes have the speeds of a recorded run (`fleet_run`), with completions of ten to three hundred
tokens.
"""


Draw = Callable[[Policy, Mapping[str, Tensor], Sequence[GroupRequest]], Iterable[FinishedRollout]]
"""Function that samples all rollouts of the requests, with these weights as the policy's adapter."""


def by_policy(policy: Policy, weights: Mapping[str, Tensor], requests: Sequence[GroupRequest]) -> list[FinishedRollout]:
    """Sample in float32 with the learner's own model."""
    with policy.holding(weights):
        return list(torch_sampler.sample_groups(policy.model, requests))


class NodeEngine:
    """Samples with a node's real engine, in its real precision."""

    def __init__(self, backend: str, precision: str, *, base_dir: Path, scratch: Path) -> None:
        """Open the engine. `scratch` holds the base model in the engine's own format. Raises BackendError."""
        self._scratch = scratch
        self._engine = SamplingEngine(backend, base_dir, scratch, precision)
        self._engine.open(width=64, threads=1)

    def __call__(
        self, policy: Policy, weights: Mapping[str, Tensor], requests: Sequence[GroupRequest]
    ) -> list[FinishedRollout]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            policy.save_adapter(Path(directory), weights)
            self._engine.set_policy(Path(directory))
        return self._engine.sample(list(requests)).rollouts

    def close(self) -> None:
        self._engine.close()


EVALUATE_EVERY: Final = 10
"""Training steps between two points of the learning curve."""
STEP_S: Final = 1.0
WIDEST: Final = 2_048
"""Maximum number of rollouts that one simulated node holds at a time."""
AT_ONCE_S: Final = 1e-30
"""Seconds that a node takes per token: negligible in virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of the learning curve, after `trained_rollouts`."""

    trained_rollouts: int
    reward: float | None
    """Mean reward of the newest step; None before the first step."""
    accuracy: float
    """Greedy accuracy on held-out problems."""
    staleness: float
    """Mean staleness of the newest step's groups."""


def run(case: Case, seed: int) -> list[Point]:
    """Run a case to its last step, with one thread; return its learning curve."""
    torch.set_num_threads(1)
    disable_progress_bar()
    learning = Learning(case.config(seed))
    go_through(learning)
    return learning.points


def go_through(learning: Learning, scenario: Scenario | None = None) -> World:
    """Run to the last step; `learning.points` then has the curve. `scenario` replaces the default one, whose nodes take
    no time.
    """
    learning.note(reward=None, staleness=0.0)
    scenario = scenario or scenario_of(learning.config)
    world = World(scenario, make=partial(hubs_own, learning), work=learning)
    world.agenda.now = STEP_S
    world.run()
    assert world.finished, "nobody has anything to do, and the run is not finished"
    return world


def scenario_of(config: HubConfig) -> Scenario:
    """Return the scenario in which nodes take no time and together hold all rollouts that the staleness bound
    allows.
    """
    training = config.training
    rollouts = (training.max_staleness + 1) * training.groups_per_step * training.group_size
    num_nodes = ceil(rollouts / WIDEST)
    return Scenario.model_validate(
        {
            **same_training(config),
            "learner": {"step_s": STEP_S, "score_s": 0.0},
            "publication": {"export_s": 0.0, "payload_bytes": 0.0, "start_s": 0.0},
            "nodes": {
                "count": num_nodes,
                "width": ceil(rollouts / num_nodes),
                "sigma": 0.0,
                "s_per_token": AT_ONCE_S,
                "delay_s": 0.0,
                "stream_s": 0.0,
            },
            "lengths": {"tokens": 1.0},
            "measuring": {"warm_up_steps": 0, "limit_s": 2.0 * STEP_S * (training.steps + 1)},
        }
    )


def same_training(config: HubConfig) -> dict[str, dict[str, Any]]:
    """Return the sections of a scenario whose values must equal those of the run's configuration."""
    names = ("steps", "groups_per_step", "group_size", "max_staleness")
    return {
        "run": {"mode": config.run.mode, "seed": config.run.seed},
        "training": {name: getattr(config.training, name) for name in names},
    }


def hubs_own(learning: Learning, settings: CoordinatorSettings, snapshot: CoordinatorSnapshot) -> Coordinator:
    """Make a coordinator with the hub's full configuration in place of `settings`."""
    tasks = trained_tasks(learning.problems)
    return Coordinator(coordinator_settings(learning.config, multi_turn=False, tasks=tasks), snapshot)


def score_of(response: object) -> float:
    assert isinstance(response, float)
    return response


class Learning:
    """The work of a simulated run, done with the real learner. When a completion of a version is first needed, all
    leases of this version are sampled in one batch.
    """

    def __init__(
        self,
        config: HubConfig,
        draw_of: Callable[[str], Draw] = lambda node_id: by_policy,
        *,
        evaluate_every: int = EVALUATE_EVERY,
    ) -> None:
        """`draw_of` returns the sampler of a node. `evaluate_every`: steps between two points of the curve."""
        base_dir = resolve_base(config.model.base)
        codec = PromptCodec.load(base_dir)
        self.config = config
        self.problems = Problems.of_run(config, codec)
        self.settings = LearnerSettings.of_run(config, base_dir=Path(base_dir), stop_ids=codec.stop_ids)
        self.policy = Policy.load(self.settings)
        self._optimizer = make_optimizer(self.policy, config.training)
        self._draw_of = draw_of
        self._evaluate_every = evaluate_every
        self._versions: dict[int, dict[str, Tensor]] = {}
        """Adapter of each version that a lease may still name."""
        self._leases: list[SendLease] = []
        self.drawn: dict[str, RolloutPayload] = {}
        self._received: dict[str, RolloutPayload] = {}
        self._rewards: dict[str, float] = {}
        self.group_of: dict[str, int] = {}
        self._draws: dict[str, NDArray[np.uint64]] = {}
        self._trained = 0
        self._planned: dict[int, StepPlanned] = {}
        self.points: list[Point] = []
        self.metrics: list[Mapping[str, float]] = []
        self.publish(0)

    def begin_with(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        """Make this adapter version 0. The weights are named as in PEFT. Call it before the first step."""
        self.policy.set_adapter({name: torch.from_numpy(weight) for name, weight in weights.items()})
        self.publish(0)

    def prepare(self, group_id: int) -> GroupPrepared:
        return prepare(self.problems, group_id)

    def lease(self, lease: SendLease) -> None:
        self._leases.append(lease)

    def lengths(self, lease: SendLease) -> Mapping[int, int] | None:
        """Return None, which tells the simulator that a node's time does not depend on the number of tokens."""
        return None

    def draw(self, sampling: Sampling) -> RolloutPayload:
        name = rollout_id(sampling.lease.lease_id, sampling.index)
        if name not in self.drawn:
            self.sample(sampling.lease.policy_version)
        return replace(self.drawn.pop(name), sampling_s=sampling.ends_at - sampling.began_at)

    def record(self, record: Record) -> None:
        match record:
            case RolloutReceived():
                self._received[record.rollout_id] = record.payload
            case ScoreRecorded():
                assert record.reward is not None, "the task has one turn"
                self._rewards[record.rollout_id] = record.reward
            case StepPlanned():
                self._planned[record.step] = record
            case RolloutsDropped():
                for name in record.rollout_ids:  # A rollout that was dropped before it arrived has no entry.
                    self._received.pop(name, None)
                    self._rewards.pop(name, None)
            case _:
                assert_never(record)

    def score(self, name: str) -> float:
        return score_of(self.problems.respond(self.group_of[name], [self._received[name].completion_ids]))

    def train(self, step: int) -> Mapping[str, float]:
        planned = self._planned.pop(step)
        metrics = train_step(self.policy, self._optimizer, self._batch(planned), self.settings)
        self.metrics.append(metrics)
        self._trained += len(planned.rollout_ids)
        if step % self._evaluate_every == 0 or step == self.config.training.steps:
            self.note(reward=metrics["mean_reward"], staleness=float(np.mean(planned.staleness)))
        return metrics

    def publish(self, policy_version: int) -> None:
        self._versions[policy_version] = {name: weight.clone() for name, weight in self.policy.published().items()}
        self._versions.pop(policy_version - self.config.training.max_staleness - 2, None)

    def sample(self, policy_version: int) -> None:
        leases = [lease for lease in self._leases if lease.policy_version == policy_version]
        self._leases = [lease for lease in self._leases if lease.policy_version != policy_version]
        by_drawer: dict[Draw, list[GroupRequest]] = {}
        for lease in leases:
            by_drawer.setdefault(self._draw_of(lease.node_id), []).append(self.request(lease))
        for draw, requests in by_drawer.items():
            for rollout in draw(self.policy, self._versions[policy_version], requests):
                name = rollout_id(rollout.lease_id, rollout.index)
                self.group_of[name] = rollout.group_id
                self.drawn[name] = arrived(rollout, node_id="").payload
                seed = self.problems.seed(rollout.group_id)
                self._draws[name] = np.array([(seed, rollout.index, len(rollout.completion_ids))], np.uint64)

    def request(self, lease: SendLease) -> GroupRequest:
        sampling = self.config.sampling
        return GroupRequest(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            indices=lease.indices,
            prompt_ids=self.problems.prompt_ids(lease.group_id),
            seed=lease.seed,
            policy_version=lease.policy_version,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_ids=self.settings.stop_ids,
        )

    def _batch(self, planned: StepPlanned) -> list[TrainingGroup]:
        rollouts: dict[int, list[TrainingRollout]] = {group_id: [] for group_id in planned.group_ids}
        for name in planned.rollout_ids:
            payload = self._received.pop(name)
            rollouts[self.group_of.pop(name)].append(
                TrainingRollout(
                    **payload.content(),
                    loss_mask=np.ones(len(payload.completion_ids), dtype=bool),
                    reward=self._rewards.pop(name),
                    draws=self._draws.pop(name),
                )
            )
        return [
            TrainingGroup(prompt_ids=self.problems.prompt_ids(group_id), rollouts=tuple(of_group))
            for group_id, of_group in rollouts.items()
        ]

    def note(self, *, reward: float | None, staleness: float) -> None:
        accuracy = self.accuracy()
        self.points.append(Point(trained_rollouts=self._trained, reward=reward, accuracy=accuracy, staleness=staleness))

    def accuracy(self) -> float:
        with self.policy.holding(self.policy.published()):
            completions = torch_sampler.greedy(
                self.policy.model,
                self.problems.heldout_prompt_ids(),
                max_tokens=self.settings.max_tokens,
                stop_ids=self.settings.stop_ids,
            )
        rewards = [score_of(self.problems.heldout_respond(number, [ids])) for number, ids in enumerate(completions)]
        return sum(map(self.problems.rewards_of(self.problems.sets[0]).is_solved, rewards)) / len(rewards)
