"""Small simulated worlds must match computations by hand; large, irregular ones must account for every rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import Effect
from echo_hub.core.accounting.events import AnswerWanted
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember
from echo_hub.simulator.node import SimulatedNode
from echo_hub.simulator.population import Traits
from echo_hub.simulator.report import SimulationReport, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import CARRY_OUT, World
from echo_shared.wire.messages import DropReason

Simulated = Callable[..., tuple[World, SimulationReport]]
UNRULY: dict[str, dict[str, Any]] = {
    "training": {"steps": 12, "groups_per_step": 8, "group_size": 4, "max_staleness": 2},
    "leases": {"deadline_s": 15.0},
    "learner": {"step_s": 4.0, "step_jitter": 0.3, "handoff_s": 0.1, "prepare_s": 0.01},
    "nodes": {"count": 20, "width": 2, "sigma": 1.0, "slow_share": 0.2, "prefill_s_per_token": 0.001},
    "lengths": {"ratio": 30.0},
    "availability": {"on_share": 0.7, "day_s": 60.0},
    "failures": {"per_hour": 60.0, "away_s": 5.0},
    "false_claims": {"count": 2, "fresh_key_s": 20.0},
    "measuring": {"limit_s": 600.0},
}


def test_every_effect_is_carried_out() -> None:
    assert set(CARRY_OUT) == set(Effect.__args__)


def test_one_node_that_waits_for_every_version(simulated: Simulated) -> None:
    """Each step takes 5 s, and after it come 0.2 s of export, 0.3 s of fetching, 2 s of sampling, and 0.05 s each of
    sending and scoring.
    """
    world, report = simulated(run={"mode": "sequential"})
    assert report.utilisation == pytest.approx(5 / 7.6)
    assert report.idle_s == pytest.approx(6 * 2.6)
    assert (report.mean_staleness, report.trained, report.dropped) == (0.0, 16, {})
    # The node already has the base, so only the lease's transfer precedes the first rollout.
    assert world.steps[0] == pytest.approx((2.15, 7.15))


def test_one_node_leased_to_after_it_reports_a_version(simulated: Simulated) -> None:
    """Each step takes 0.1 s longer than in sequential mode: 0.05 s until the hub knows that the node has the version,
    and 0.05 s until the lease arrives.
    """
    _, report = simulated(training={"max_staleness": 0})
    assert report.utilisation == pytest.approx(5 / 7.7)


def test_sampling_during_training_hides_its_whole_time(simulated: Simulated) -> None:
    _, report = simulated(training={"max_staleness": 1})
    assert report.utilisation == pytest.approx(1.0)
    assert report.mean_staleness <= 1 and report.dropped == {}


def test_the_hand_off_between_steps_is_idle_time(simulated: Simulated) -> None:
    _, report = simulated(learner={"handoff_s": 1.0})
    assert report.utilisation == pytest.approx(5 / 6)


def test_a_step_takes_longer_with_more_rollouts(simulated: Simulated) -> None:
    world, _ = simulated(learner={"step_s_per_rollout": 0.5})
    assert [end - begin for begin, end in world.steps] == pytest.approx([6.0] * 8)


def test_the_same_seed_gives_the_same_run(simulated: Simulated) -> None:
    runs = [simulated(**UNRULY, run={"seed": seed})[1] for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_the_clock_has_no_influence(scenario_of: Callable[..., Scenario]) -> None:
    def with_clock(clock: Callable[[], float]) -> SimulationReport:
        world = World(scenario_of(**UNRULY), clock)
        world.run()
        report = report_of(world)
        return replace(
            report, core=replace(report.core, events_per_s=None, worst_event_ms=0, worst_event="", ms_by_kind={})
        )

    ticking: Iterator[int] = count()
    assert with_clock(lambda: 0.0) == with_clock(lambda: float(next(ticking)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_every_rollout_is_accounted_for_under_any_node_behaviour(simulated: Simulated, seed: int, mode: str) -> None:
    _, report = simulated(**UNRULY, run={"seed": seed, "mode": mode})
    assert report.balanced and report.leased > 0


@pytest.mark.parametrize("seed", range(2))
def test_tenants_samples_are_answered_beside_training(scenario_of: Callable[..., Scenario], seed: int) -> None:
    """The nodes fail often, so some samples need several leases. Every sample is answered once."""
    world = World(scenario_of(**UNRULY, run={"seed": seed}))
    for number in range(24):
        group = AnswerGroup(
            group_id=FIRST_ANSWER_ID + number,
            tenant_id="t",
            prompt_ids=np.array([1], np.int32),
            policy_version=0,
            seed=number,
            sampling=SamplingParameters(temperature=1.0, max_tokens=400),
            is_checked=False,
            members=(AnswerMember(request_id=f"r{number}", num_samples=4),),
        )
        world.agenda.at(10.0 + 0.5 * number, world.tell, AnswerWanted(group=group))
    world.run()
    report = report_of(world)
    assert report.balanced and report.finished
    assert report.answered == 24 * 4 and world.core.coordinator.status().requests_open == 0


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_completions_obey_their_leases(simulated: Simulated, seed: int) -> None:
    training = {**UNRULY["training"], "on_new_version": "interrupt"}
    world, report = simulated(**{**UNRULY, "training": training}, run={"seed": seed})
    assert report.balanced and report.mixed_share > 0
    assert world.accounts.dropped[DropReason.INVALID] == 0
    assert report.token_staleness < report.mean_staleness <= 2


def test_liars_get_leases_and_train_nothing(simulated: Simulated) -> None:
    world, report = simulated(
        training={"steps": 30, "groups_per_step": 4},
        leases={"deadline_s": 10.0},
        nodes={"count": 8},
        false_claims={"count": 3, "fresh_key_s": 15.0},
        measuring={"limit_s": 300.0},
    )
    liars = {number for number in world.accounts.leased_of if number >= 8}
    assert liars and not any(world.accounts.trained_of[number] for number in liars)
    assert 0 < report.liars_share < 1


def test_a_run_without_samplers_is_aborted(simulated: Simulated) -> None:
    world, report = simulated(availability={"on_share": 0.01, "day_s": 1e6}, measuring={"limit_s": 50.0})
    assert not report.finished and world.agenda.now == 50.0
    assert (report.steps, report.utilisation, report.balanced) == (0, 0.0, True)


def test_a_thousand_nodes_in_seconds(simulated: Simulated) -> None:
    _, report = simulated(
        training={"steps": 5, "groups_per_step": 250, "group_size": 8, "max_staleness": 2},
        nodes={"count": 1_000, "sigma": 0.5},
    )
    assert report.finished and report.balanced and report.trained == 10_000


WARM_UP = 4
"""Number of steps after which the hub knows how fast nodes and learner are."""


@pytest.mark.parametrize("seed", range(4))
def test_the_next_steps_rollouts_are_leased_before_the_learner_waits(seed: int) -> None:
    """Each version serves two steps. The pool pauses between versions and then starts just in time for the second step,
    so that its last rollouts return only after that step's planned start. If they were leased later, the learner would
    wait for a whole rollout, 0.3 s or more.
    """
    scenario = Scenario.model_validate(
        {
            "run": {"seed": seed},
            "training": {
                "steps": 40,
                "groups_per_step": 16,
                "group_size": 8,
                "max_staleness": 3,
                "publish_every": 2,
            },
            "learner": {"step_s": 2.0},
            "publication": {"start_s": 2.4, "payload_bytes": 0.0, "planned_nodes": 0},
            "nodes": {"count": 2, "width": 29, "sigma": 0.0, "s_per_token": 0.08, "delay_s": 0.02},
            "lengths": {"tokens": 4, "ratio": 2.5},
        }
    )
    world = World(scenario)
    world.run()
    waits = [begin - end for (_, end), (begin, _) in pairwise(world.steps)]
    assert max(waits[WARM_UP:]) < 0.2


@pytest.mark.parametrize(("beside", "ratio"), [(0, 1.0), (8, 8.0)])
def test_a_fast_new_node_is_soon_busy(beside: int, ratio: float) -> None:
    """A node of 25,000 tokens/s and width 256 joins an empty run, or after 30 s a run of 8 slow nodes. A rollout takes
    it 1 s. If it did not claim its speed, it would be busy only after 10 s, or after 24 s among slow nodes.
    """
    joins_s = 30.0 if beside else 0.0
    slow = Traits(width=8, capacity=16, s_per_token=0.02, prefill_s=0.0, fetch_s=0.3, phase=0.0, price_per_hour=0.0)
    fast = replace(slow, width=256, capacity=512, s_per_token=256 / 25_000, phase=(1 - joins_s / 1_000) % 1)
    scenario = Scenario.model_validate(
        {
            "training": {"steps": 100, "groups_per_step": 16, "group_size": 16},
            "learner": {"step_s": 0.6},
            "publication": {"planned_nodes": 0},
            "nodes": {"count": 1 + beside},
            "lengths": {"ratio": ratio},
            "availability": {"on_share": 0.5, "day_s": 1_000.0},
            "measuring": {"limit_s": joins_s + 6.0},
        }
    )
    world = World(scenario, nodes=[fast] + [slow] * beside)
    busy: list[int] = []

    def look(node: SimulatedNode) -> None:
        busy.append(256 - node.free)
        world.agenda.at(world.agenda.now + 0.1, look, node)

    look(world.fleet.honest[0])
    world.run()
    assert max(busy) == 256
