"""A simulated world must call its work, the computing of nodes and learner, at the times of the scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.core.accounting.effects import RolloutReceived, SendLease, StepPlanned
from echo_hub.simulator.node import HeldLease, Sampling, SimulatedNode
from echo_hub.simulator.population import draw_nodes
from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.work import MadeUp, Record
from echo_hub.simulator.world import World
from echo_shared.records.rollout import RolloutPayload

ScenarioOf = Callable[..., Scenario]


class Noted(MadeUp):
    """Records the calls in order, and gives its steps metrics."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.asked: list[tuple[str, int | str]] = []

    def lease(self, lease: SendLease) -> None:
        self.asked.append(("lease", lease.group_id))

    def draw(self, sampling: Sampling) -> RolloutPayload:
        self.asked.append(("draw", sampling.lease.group_id))
        return super().draw(sampling)

    def record(self, record: Record) -> None:
        if isinstance(record, StepPlanned):
            self.asked.append(("plan", record.step))
        elif isinstance(record, RolloutReceived):
            self.asked.append(("receive", record.rollout_id))

    def score(self, rollout_id: str) -> float:
        self.asked.append(("score", rollout_id))
        return super().score(rollout_id)

    def train(self, step: int) -> Mapping[str, float]:
        self.asked.append(("train", step))
        return {"loss": 0.5}

    def publish(self, policy_version: int) -> None:
        self.asked.append(("publish", policy_version))


def test_work_is_asked_in_the_order_of_a_run(scenario_of: ScenarioOf) -> None:
    scenario = scenario_of(run={"mode": "sequential"}, training={"steps": 2}, measuring={"warm_up_steps": 0})
    work = Noted(scenario)
    World(scenario, work=work).run()
    of_steps = [kind for kind, _ in work.asked if kind not in ("draw", "receive", "score")]
    assert of_steps == ["lease", "plan", "train", "publish"] * 2
    of_one = [kind for kind, what in work.asked if what == "1-1"]
    assert of_one == ["receive", "score"] and [kind for kind, _ in work.asked].count("draw") == 4
    assert [what for kind, what in work.asked if kind in ("train", "publish")] == [1, 1, 2, 2]


class Long(MadeUp):
    """Gives completions a length that follows from their index, whatever the scenario says."""

    def lengths(self, lease: SendLease) -> Mapping[int, int]:
        return {index: 10 * (index + 1) for index in lease.indices}


def test_nodes_and_lengths_may_be_those_of_a_real_fleet(scenario_of: ScenarioOf) -> None:
    scenario = scenario_of(lengths={"tokens": 1.0})
    quick, slow = (replace(draw_nodes(scenario)[0], width=2, capacity=2, paces=(pace,)) for pace in (0.01, 0.05))
    world = World(scenario, work=Long(scenario), nodes=[quick, slow])
    world.run()
    assert world.finished and len(world.fleet.honest) == 2
    quick_trained, slow_trained = (world.accounts.trained_of[number] for number in (0, 1))
    assert quick_trained > slow_trained > 0, "a node that samples a token sooner returns more"
    assert world.accounts.tokens > world.accounts.planned, "no completion has only one token"


def test_made_up_completions_of_a_length_share_an_array(scenario_of: ScenarioOf) -> None:
    scenario = scenario_of()
    work = MadeUp(scenario)
    node = SimulatedNode("node-0", 0, draw_nodes(scenario)[0])
    lease = HeldLease(node=node, lease_id=1, group_id=0, policy_version=0)
    samplings = [Sampling(lease, index, tokens) for index, tokens in enumerate((3, 3, 4))]
    for sampling in samplings:
        sampling.began_at, sampling.ends_at = 1.0, 2.5
    first, second, third = map(work.draw, samplings)
    assert first.completion_ids is second.completion_ids and len(third.completion_ids) == 4
    assert first.sampling_s == pytest.approx(1.5)
    assert {work.score("1-0"), work.score("1-1")} == {0.0, 1.0}


def test_a_colocated_hub_samples_between_its_steps(
    simulated: Callable[..., tuple[World, SimulationReport]],
) -> None:
    """Each step needs 2 s of sampling, 0.1 s of transfers both ways and 0.05 s of scoring; an export takes 0.2 s."""
    settings: dict[str, Any] = {"run": {"mode": "colocated"}, "publication": {"start_s": 0.0}}
    world, report = simulated(**settings)
    assert world.fleet.honest[0].node_id == "hub"
    assert report.finished and report.mean_staleness == 0 and report.dropped == {}
    assert report.utilisation == pytest.approx(5 / (5 + 2 + 0.1 + 0.05), abs=0.03)
    assert report_of(world).balanced
