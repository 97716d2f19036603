"""A run by a real fleet in virtual time: slow nodes, rounded weights and long completions lose more rollouts.

The nodes are those of a recording (`recording`). Every node uses its recorded engine, precision and pace; completions
are as long as the model makes them. Unfinished rollouts do not continue elsewhere. Coordinator, problems, scorer and
learner are the hub's own, as in every virtual run. The length and the reward of dropped rollouts are known too, which
gives two figures:

    length_bias   | mean tokens of the trained rollouts / mean tokens of all requested rollouts - 1 |; each place of a
                  group counts once, with the mean of its leases
    lost_share    share of the tokens of all leased rollouts that was not trained
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.learning.engines import Draw, NodeEngine, by_policy
from benchmarks.learning.recording import RecordedNode
from benchmarks.learning.virtual_run import Learning, Point, hubs_own, score_of
from echo_hub.config.sections import HubConfig
from echo_hub.core.effects import RolloutsDropped, SendLease, StepPlanned
from echo_hub.run.base_model import resolve_base
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.work import Record
from echo_hub.simulator.world import World
from echo_shared.messages import rollout_id

TRAINED: Final = "trained"
POOL_OVER_NEED: Final = 1.15
"""Rollouts that the fleet draws in a step's time, over those of the step: the margin of hubs (`cost.margin`)."""
MEASURED_PROBLEMS: Final = 64
"""Problems that give the mean length of completions before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Rollouts of one outcome."""

    outcome: str
    """`trained`, or the drop reason."""
    rollouts: int
    tokens: float
    """Mean tokens."""
    reward: float
    """Mean reward, dropped rollouts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """Figures of a run by a fleet."""

    points: list[Point]
    fates: list[Fate]
    asked_tokens: float
    """Mean tokens of all requested rollouts, each place of a group once."""
    asked_reward: float
    shortest: int
    """The 1 % quantile of tokens."""
    longest: int
    """The 99 % quantile of tokens."""
    utilisation: float

    @property
    def length_bias(self) -> float:
        return abs(self._trained.tokens / self.asked_tokens - 1)

    @property
    def reward_bias(self) -> float:
        """Mean reward of the trained rollouts minus that of all requested rollouts."""
        return self._trained.reward - self.asked_reward

    @property
    def lost_share(self) -> float:
        trained = self._trained
        return 1 - trained.rollouts * trained.tokens / sum(fate.rollouts * fate.tokens for fate in self.fates)

    @property
    def _trained(self) -> Fate:
        return next(fate for fate in self.fates if fate.outcome == TRAINED)


class FleetLearning(Learning):
    """Knows the length, the reward and the outcome of every leased rollout."""

    def __init__(self, config: HubConfig, draw_of: Mapping[str, Draw]) -> None:
        super().__init__(config, draw_of.__getitem__)
        self.places: dict[str, tuple[int, int]] = {}
        """Group and index of each rollout."""
        self.tokens: dict[str, int] = {}
        self.earned: dict[str, float] = {}
        self.outcomes: dict[str, str] = {}

    def lengths(self, lease: SendLease) -> Mapping[int, int]:
        names = {index: rollout_id(lease.lease_id, index) for index in lease.indices}
        self.places |= {name: (lease.group_id, index) for index, name in names.items()}
        if any(name not in self.tokens for name in names.values()):
            self.sample(lease.policy_version)
            for name in self.drawn.keys() - self.tokens.keys():
                ids = self.drawn[name].completion_ids
                self.tokens[name] = len(ids)
                self.earned[name] = score_of(self.problems.respond(self.group_of[name], [ids]))
        return {index: self.tokens[name] for index, name in names.items()}

    def record(self, record: Record) -> None:
        match record:
            case RolloutsDropped():
                self.outcomes |= dict.fromkeys(record.rollout_ids, record.reason.value)
            case StepPlanned():
                self.outcomes |= dict.fromkeys(record.rollout_ids, TRAINED)
        super().record(record)

    def mean_tokens(self) -> float:
        """Mean tokens of the base model's completions of the first problems."""
        leases = [
            SendLease(
                node_id="",
                lease_id=group_id,
                group_id=group_id,
                indices=(0,),
                seed=self.problems.seed(group_id),
                policy_version=0,
                deadline_s=1.0,
            )
            for group_id in range(MEASURED_PROBLEMS)
        ]
        drawn = by_policy(self.policy, self.policy.published(), [self.request(lease) for lease in leases])
        return fmean(len(rollout.completion_ids) for rollout in drawn)

    @property
    def fates(self) -> list[Fate]:
        """Fates of all rollouts with a known outcome."""
        found = []
        for outcome in sorted({*self.outcomes.values()}, key=lambda outcome: (outcome != TRAINED, outcome)):
            names = [name for name in self._known if self.outcomes[name] == outcome]
            if names:
                found.append(
                    Fate(
                        outcome=outcome,
                        rollouts=len(names),
                        tokens=fmean(self.tokens[name] for name in names),
                        reward=fmean(self.earned[name] for name in names),
                    )
                )
        return found

    def mean_asked(self, of: Mapping[str, float]) -> float:
        """Mean of a figure of each rollout, over all places with a known outcome, each place once."""
        by_place: dict[tuple[int, int], list[float]] = {}
        for name in self._known:
            by_place.setdefault(self.places[name], []).append(of[name])
        return fmean(map(fmean, by_place.values()))

    @property
    def _known(self) -> list[str]:
        """Rollouts with a known outcome."""
        return [name for name in self.outcomes if name in self.tokens]


def run(config: HubConfig, nodes: Sequence[RecordedNode]) -> FleetFigures:
    """Carry out one run, from its start to its last step."""
    torch.set_num_threads(1)
    disable_progress_bar()
    base_dir = resolve_base(config.model.base)
    with tempfile.TemporaryDirectory(prefix="echo-fleet-") as scratch, ExitStack() as engines:
        draws: dict[tuple[str, str], Draw] = {("torch", "f32"): by_policy}
        for node in nodes:
            kind = (node.backend, node.precision)
            if kind not in draws:
                directory = Path(scratch) / "-".join(kind)
                directory.mkdir()
                engine = NodeEngine(*kind, base_dir=base_dir, scratch=directory)
                draws[kind] = engines.enter_context(closing(engine))
        learning = FleetLearning(
            config, {f"node-{number}": draws[node.backend, node.precision] for number, node in enumerate(nodes)}
        )
        learning.note(reward=None, staleness=0.0)
        world = World(
            scenario_of(config, nodes, mean_tokens=learning.mean_tokens()),
            make=partial(hubs_own, learning),
            work=learning,
            nodes=[node.traits for node in nodes],
        )
        world.run()
        assert world.finished, "nobody has anything to do, and the run is not finished"
    lengths = np.array(list(learning.tokens.values()))
    begun, ended = world.steps[0][0], world.steps[-1][1]
    return FleetFigures(
        points=learning.points,
        fates=learning.fates,
        asked_tokens=learning.mean_asked(learning.tokens),
        asked_reward=learning.mean_asked(learning.earned),
        shortest=int(np.quantile(lengths, 0.01)),
        longest=int(np.quantile(lengths, 0.99)),
        utilisation=sum(end - begin for begin, end in world.steps) / (ended - begun),
    )


def scenario_of(config: HubConfig, nodes: Sequence[RecordedNode], *, mean_tokens: float) -> Scenario:
    """Make a scenario of a learner that is as fast as the fleet allows, and versions that take time to reach the
    nodes."""
    training = config.training
    rollouts = training.groups_per_step * training.group_size
    drawn_per_s = sum(node.width / node.traits.s_per_token for node in nodes) / mean_tokens
    step_s = POOL_OVER_NEED * rollouts / drawn_per_s
    return Scenario.model_validate(
        {
            "run": {"mode": config.run.mode, "seed": config.run.seed},
            "training": {
                name: getattr(training, name) for name in ("steps", "groups_per_step", "group_size", "max_staleness")
            },
            "learner": {"step_s": step_s},
            "nodes": {"count": len(nodes), "stream_s": 0.0},
            "measuring": {"warm_up_steps": 0, "limit_s": 20.0 * (step_s + 5.0) * (training.steps + 1)},
        }
    )
