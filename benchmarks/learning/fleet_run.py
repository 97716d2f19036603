"""A run by a recorded fleet in virtual time, to measure how many rollouts are lost: slow nodes, rounded weights and
long completions lose more.

arrivals.json was recorded from a run of hub and nodes as processes, on two cores that other programs used too. For each
node it lists the seconds per token of its rollouts, in order of arrival. Every node uses its recorded engine, precision
and seconds per token; the model decides the length of completions. Unfinished rollouts do not continue elsewhere.
Coordinator, problems, scorer and learner are the hub's own, as in every virtual run. The length and the reward of
dropped rollouts are known too, which gives two figures:

    length_bias   | mean tokens of the trained rollouts / mean tokens of all requested rollouts - 1 |; each place of a
                  group counts once, with the mean of its leases
    lost_share    share of the tokens of all leased rollouts that was not trained
"""

from __future__ import annotations

import json
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

from benchmarks.learning.virtual_run import Draw, Learning, NodeEngine, by_policy, hubs_own, same_training, score_of
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import RolloutsDropped, SendLease, StepPlanned
from echo_hub.run.base_files import resolve_base
from echo_hub.simulator.population import Traits
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.work import Record
from echo_hub.simulator.world import World
from echo_shared.wire.messages import rollout_id

RECORDED: Final = Path(__file__).with_name("arrivals.json")
POOL_OVER_NEED: Final = 1.15
"""Rollouts that the fleet samples during a training step, divided by the rollouts that the step needs. Hubs keep this
margin (`cost.margin`).
"""
MEASURED_PROBLEMS: Final = 64
"""Number of problems with which the mean length of completions is measured before the run."""
UPLINK_BYTES_S: Final = 2.5e6
"""Assumed uplink of each node in bytes per second (20 Mbit/s), because the recording has no rates of links."""
DOWNLINK_BYTES_S: Final = 12.5e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNode:
    backend: str
    precision: str
    width: int
    paces: tuple[float, ...]
    """Seconds per token of each rollout, in the order of arrival."""

    @property
    def traits(self) -> Traits:
        return Traits(
            width=self.width,
            capacity=2 * self.width,
            s_per_token=fmean(self.paces),
            paces=self.paces,
            prefill_s=0.0,  # The recorded paces include the time for the prompts.
            fetch_s=0.0,
            phase=0.0,
            price_per_hour=0.0,
            uplink_bytes_s=UPLINK_BYTES_S,
            downlink_bytes_s=DOWNLINK_BYTES_S,
        )


def recorded_nodes() -> tuple[RecordedNode, ...]:
    nodes = json.loads(RECORDED.read_text())
    return tuple(RecordedNode(**{**node, "paces": tuple(node["paces"])}) for node in nodes)


class FleetLearning(Learning):
    """Records length and reward of every leased rollout, and which rollouts were trained."""

    def __init__(self, config: HubConfig, draw_of: Mapping[str, Draw]) -> None:
        super().__init__(config, draw_of.__getitem__)
        self.places: dict[str, tuple[int, int]] = {}
        self.tokens: dict[str, int] = {}
        self.earned: dict[str, float] = {}
        self.is_trained: dict[str, bool] = {}
        """True for trained rollouts, False for dropped ones. A rollout in progress has no entry."""

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
                self.is_trained |= dict.fromkeys(record.rollout_ids, False)
            case StepPlanned():
                self.is_trained |= dict.fromkeys(record.rollout_ids, True)
        super().record(record)

    def mean_tokens(self) -> float:
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

    def figures(self, utilisation: float) -> dict[str, float]:
        """Return the figures of a run. Each `..._bias` compares trained rollouts with all requested ones.
        `shortest_tokens` and `longest_tokens` are the 1 % and 99 % quantiles of the completions' lengths.
        """
        known = [name for name in self.is_trained if name in self.tokens]
        trained = [name for name in known if self.is_trained[name]]
        by_place: dict[tuple[int, int], list[str]] = {}
        for name in known:
            by_place.setdefault(self.places[name], []).append(name)

        def asked(of: Mapping[str, float]) -> float:
            return fmean(fmean(of[name] for name in names) for names in by_place.values())

        lengths = np.array(list(self.tokens.values()))
        return {
            "length_bias": abs(fmean(self.tokens[name] for name in trained) / asked(self.tokens) - 1),
            "reward_bias": fmean(self.earned[name] for name in trained) - asked(self.earned),
            "lost_share": 1 - sum(self.tokens[name] for name in trained) / sum(self.tokens[name] for name in known),
            "accuracy_before": self.points[0].accuracy,
            "accuracy_after": self.points[-1].accuracy,
            "trained_rollouts": len(trained),
            "shortest_tokens": int(np.quantile(lengths, 0.01)),
            "longest_tokens": int(np.quantile(lengths, 0.99)),
            "utilisation": utilisation,
        }


def run(config: HubConfig, nodes: Sequence[RecordedNode]) -> dict[str, float]:
    """Run to the last training step. Return the figures of the run."""
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
    begun, ended = world.steps[0][0], world.steps[-1][1]
    return learning.figures(sum(end - begin for begin, end in world.steps) / (ended - begun))


def scenario_of(config: HubConfig, nodes: Sequence[RecordedNode], *, mean_tokens: float) -> Scenario:
    """Return the scenario: the learner is as fast as the fleet allows, and versions take time to reach the nodes."""
    training = config.training
    rollouts = training.groups_per_step * training.group_size
    drawn_per_s = sum(node.width / node.traits.s_per_token for node in nodes) / mean_tokens
    step_s = POOL_OVER_NEED * rollouts / drawn_per_s
    return Scenario.model_validate(
        {
            **same_training(config),
            "learner": {"step_s": step_s},
            "nodes": {"count": len(nodes), "stream_s": 0.0},
            "measuring": {"warm_up_steps": 0, "limit_s": 20.0 * (step_s + 5.0) * (training.steps + 1)},
        }
    )
