"""The baseline dispatch leases in its documented order; all other parts are the hub's."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate.plain_dispatch import plain
from echo_hub.core.effects import SendLease
from echo_hub.simulator.report import Report, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World


class Watched(World):
    """Records the leases in order, with their times."""

    leases: list[tuple[float, SendLease]]

    def _carry_out(self, effects: list[Any]) -> None:
        self.leases += [(self.agenda.now, effect) for effect in effects if isinstance(effect, SendLease)]
        super()._carry_out(effects)


def ran(*, spread: bool, aware: bool, **sections: dict[str, Any]) -> tuple[Watched, Report]:
    settings: dict[str, dict[str, Any]] = {
        "training": {"steps": 6, "groups_per_step": 4, "group_size": 4, "max_staleness": 1},
        "nodes": {"count": 3, "width": 4, "sigma": 1.0},
        "measuring": {"warm_up_steps": 2},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    world = Watched(Scenario.model_validate(settings), make=plain(spread=spread, aware=aware))
    world.leases = []
    world.run()
    return world, report_of(world)


def test_whole_groups_in_order_as_soon_as_may_be_as_many_as_are_claimed() -> None:
    world, report = ran(spread=False, aware=False)
    at_once = [effect for at, effect in world.leases if at == 0]
    assert [lease.group_id for lease in at_once] == [0, 1, 2, 3, 4, 5]
    assert [lease.node_id for lease in at_once] == ["node-0", "node-1", "node-2"] * 2
    assert all(lease.indices == (0, 1, 2, 3) for _, lease in world.leases)
    assert report.finished and report.balanced


def test_spread_members_go_to_the_nodes_in_turn() -> None:
    world, report = ran(spread=True, aware=False)
    first = [(lease.group_id, lease.indices, lease.node_id) for at, lease in world.leases if at == 0]
    assert len(first) == 3 * 8
    assert first[:5] == [(0, (index,), f"node-{index % 3}") for index in range(4)] + [(1, (0,), "node-1")]
    assert report.finished and report.balanced


def test_the_longest_of_a_step_go_to_the_fastest_node() -> None:
    world, report = ran(
        spread=False,
        aware=True,
        training={"steps": 30},
        lengths={"ratio": 30.0, "prompts": 8, "prompt_share": 1.0},
        measuring={"warm_up_steps": 20},
    )
    assert report.finished and report.balanced
    speed = {node.node_id: node.traits.s_per_token for node in world.fleet.honest}
    tokens = {group: world.fleet.lengths.of_group(group)[0] for group in range(8)}
    late = [lease for _, lease in world.leases if lease.group_id >= 40]
    by_length = sorted(late, key=lambda lease: tokens[lease.group_id % 8])
    half = len(by_length) // 2

    def mean_speed(leases: list[SendLease]) -> float:
        return sum(speed[lease.node_id] for lease in leases) / len(leases)

    assert mean_speed(by_length[half:]) < mean_speed(by_length[:half])


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_rollout_is_accounted_for_under_any_node_behaviour(spread: bool, seed: int) -> None:
    _, report = ran(
        spread=spread,
        aware=bool(seed % 2),
        run={"seed": seed},
        leases={"deadline_s": 15.0},
        nodes={"count": 12},
        availability={"on_share": 0.7, "day_s": 60.0},
        failures={"per_hour": 60.0, "away_s": 5.0},
        false_claims={"count": 1, "capacity": 8, "fresh_key_s": 20.0},
        measuring={"limit_s": 600.0},
    )
    assert report.balanced and report.trained > 0
