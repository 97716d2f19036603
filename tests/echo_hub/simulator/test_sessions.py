from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_hub.core.accounting.effects import SendLease
from echo_hub.core.accounting.events import RolloutContinued, RolloutScored, SessionDiverged, SessionLost
from echo_hub.simulator.report import SimulationReport
from echo_hub.simulator.scenario import Scenario, SimulatedSessions
from echo_hub.simulator.sessions import SimulatedHost
from echo_hub.simulator.world import World
from echo_shared.wire.messages import DropReason

Simulated = Callable[..., tuple[World, SimulationReport]]


def answers(turn: int, **sessions: float) -> set[type]:
    host = SimulatedHost(Scenario(sessions=SimulatedSessions(slots=1, turns=3, **sessions)))
    lease = {"node_id": "0", "group_id": 0, "indices": (0,), "seed": 1, "policy_version": 0, "deadline_s": 1.0}
    host.lease(SendLease(lease_id=7, turn=turn, **lease))
    return {type(host.answer(RolloutScored(rollout_id="7-0", reward=1.0))) for _ in range(40)}


def test_an_episode_ends_with_its_last_turn() -> None:
    assert answers(0) == answers(1) == {RolloutContinued} and answers(2) == {RolloutScored}


def test_sessions_are_lost_with_the_scenarios_probabilities() -> None:
    assert answers(1, lost_share=1.0) == {SessionLost} and answers(1, diverged_share=1.0) == {SessionDiverged}
    assert answers(0, diverged_share=1.0) == {RolloutContinued}, "no earlier turn can get another answer"
    assert answers(1, lost_share=0.3, diverged_share=0.3) == {SessionLost, SessionDiverged, RolloutContinued}


@pytest.mark.parametrize("slots", [1, 9, 100])
def test_lost_sessions_stop_no_run_and_every_rollout_has_one_end(simulated: Simulated, slots: int) -> None:
    world, report = simulated(
        training={"steps": 6, "groups_per_step": 4, "group_size": 4, "max_staleness": 1},
        nodes={"count": 6, "width": 2, "sigma": 0.5},
        sessions={"slots": slots, "turns": 3, "lost_share": 0.1, "diverged_share": 0.1},
    )
    assert world.finished and report.balanced
    assert world.accounts.dropped[DropReason.SESSION_LOST] > 0
    assert len(world.steps) == 6


def test_a_run_without_losses_drops_nothing_as_lost(simulated: Simulated) -> None:
    _, report = simulated(sessions={"slots": 8, "turns": 4})
    assert str(DropReason.SESSION_LOST) not in report.dropped
    assert report.trained >= 8 * 2 * 4
