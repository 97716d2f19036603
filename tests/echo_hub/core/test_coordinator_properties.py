"""A random world around the coordinator: whatever happens, the hub's records must be right and the run must finish.

Nodes connect, vanish, forget, resend, answer late, return leases and send garbage. The learner holds up to two steps,
and dies before, between and after their checkpoints. The hub dies before its commit, between commit and actions, and
between turns; its learner may survive it. The hub is then rebuilt from a real store. After every turn the invariants
are checked against an independent model. At the end, one reliable node and a reliable learner must be enough to finish
the run.

An episode's turns, tokens and reward follow from its group and index, so lock-step runs must have the same batches
whatever faults occurred.

An operator pauses and drains the run, and changes the staleness bound and the publication interval. Batches must
respect the current bound, a pause must stop leases, and the run must finish.

At random, a verifier checks rollouts, finds forgeries or gives up. A batch must not contain a rollout that is known as
forged, that waits for its check, or whose node is quarantined (excluded as dishonest; the operator may pardon it). In
other worlds nodes check each other: they report random findings, cannot tell, never answer, or leave.

In some worlds episodes are sessions. Sessions are lost, or answer otherwise after they are rebuilt, also because the
hub restarted. Batches must have whole episodes whose turns follow the answers that the store has. The store must
remember what was lost, and every session is closed once its episode has ended.

Tenants ask for samples, also by versions of their own, and cancel. Each sample is answered and delivered once, also
when the hub dies meanwhile; at the end, every request that was not cancelled is answered.

A second coordinator gets the same events and must return the same effects. Nodes also evaluate versions: each episode
of an evaluation ends once, with exactly the version that is evaluated. The run ends without waiting for evaluations,
and evaluations end without waiting for the run's end.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from echo_hub.actions.records import ActionOutcome
from echo_shared.wire.messages import (
    Checked,
    DropReason,
)
from tests.echo_hub.core.modelled_world import DEADLINE_S, USEFUL
from tests.echo_hub.core.walked_world import World


def _subset(chance: Random) -> set[str]:
    return {node_id for node_id in "abc" if chance.random() < 0.6}


Move = tuple[int, Callable[[World, Random], None]]
CHECKS = ["honest", "honest", "odd", "odd", "forged", "abandoned"]
SCORING: Move = (
    9,
    lambda world, chance: world.score(chance.choice(["good", "good", "invalid", "failed", "failed"]), 3),
)
FAST_NODES: Move = (6, lambda world, chance: world.much_goes_well(set("abc"), set("abc"), False))
"""A move with fast nodes, after which batches for two steps are usually ready."""
ASKED: list[tuple[str, str | float]] = [
    ("leasing", "paused"),
    ("leasing", "draining"),
    *[("leasing", "open")] * 3,
    *[("max_staleness", bound) for bound in range(5)],
    *[("publish_every", every) for every in range(1, 5)],
    *[("publish_now", "")] * 2,
    ("learning_rate", 1e-3),
    ("spend_cap_per_hour", 1.0),
]
LOSSES = ["lost", "diverged", "diverged", "lost by hub", "diverged by hub"]
SESSIONS: list[Move] = [
    (20, lambda world, chance: world.sessions_are_lost(chance.choice(LOSSES), 2, chance.randrange(99))),
    (2, lambda world, chance: world.slots_change(chance.choice([0, 1, 4, 99]))),
]
OPERATING: Move = (2, lambda world, chance: world.operator_asks(chance.choice(ASKED)))
MOVES: list[Move] = [
    SCORING,
    (6, lambda world, chance: world.node_is_checked(chance.choice("abc"), chance.choice(CHECKS))),
    (2, lambda world, chance: world.check(chance.choice(CHECKS), 2)),
    (2, lambda world, chance: world.operator_pardons(chance.choice("abc"))),
    OPERATING,
    (12, lambda world, chance: world.much_goes_well(_subset(chance), _subset(chance), chance.random() < 0.5)),
    (6, lambda world, chance: world.node_works(chance.choice("abc"), chance.randrange(99), chance.random() < 0.7)),
    (5, lambda world, chance: world.node_reports(chance.choice("abc"), chance.randrange(13), chance.random() < 0.4)),
    (3, lambda world, chance: world.time_passes(chance.choice([0.5, 4.0, DEADLINE_S + 1]))),
    (2, lambda world, chance: world.prepare(chance.random() < 0.5, 3)),
    (2, lambda world, chance: world.node_sends_garbage(chance.choice("abc"), chance.randrange(99), "version")),
    (1, lambda world, chance: world.node_sends_garbage(chance.choice("abc"), chance.randrange(99), "lease")),
    (1, lambda world, chance: world.node_gives_back(chance.choice("abc"), chance.randrange(99))),
    (1, lambda world, chance: world.node_vanishes(chance.choice("abc"), chance.random() < 0.5)),
    (
        1,
        lambda world, chance: world.node_connects(chance.choice("abc"), chance.randrange(13), 0, chance.random() < 0.7),
    ),
    (
        1,
        lambda world, chance: world.hub_dies(
            chance.choice(["before commit", "after commit", "now"]), chance.randrange(3)
        ),
    ),
    (3, lambda world, chance: world.learner_dies(chance.randrange(3)) if world.learner is not None else None),
    (3, lambda world, chance: world.learner_computes() if world.num_computed < len(world.jobs) else None),
    (3, lambda world, chance: world.learner_trains(chance.random() < 0.4, True) if world.jobs else None),
    (4, lambda world, chance: world.evaluation_is_wanted(chance.randrange(99))),
    (
        2,
        lambda world, chance: world.samples_are_wanted(chance.randint(1, 3), chance.randrange(3), chance.randrange(99)),
    ),
    (1, lambda world, chance: world.samples_are_cancelled(chance.randrange(99)) if world.requests else None),
    (1, lambda world, chance: world.evaluation_is_abandoned(chance.randrange(99)) if chance.random() < 0.2 else None),
    (1, lambda world, chance: world.publish(chance.random() < 0.5) if world.publishing else None),
]


def walk(
    seed: int,
    moves: int,
    *,
    scorer_fails: bool = True,
    fast_nodes: bool = False,
    operating: int = 0,
    sessions: int = 0,
) -> World:
    """Run a world through many random moves, which are chosen such that runs progress and faults occur in every phase.
    `sessions`: number of sessions that may be open at once; 0: episodes are no sessions.
    """
    chance = Random(seed)
    world = World()
    world.begin(
        mode=("async", "async", "sequential", "colocated")[seed % 4],
        steps=chance.randint(3, 12),
        groups_per_step=chance.randint(1, 4),
        group_size=chance.randint(2, 4),
        max_staleness=chance.randint(0, 3),
        pick=chance.randrange(99),
        turns=chance.randint(1, 3),
        dynamic_sampling=chance.random() < 0.5,
        tokens_per_step=chance.choice([0, 8, 25, 60]),
        evaluation=chance.choice([(0, 0), (3, 0), (2, 3)]),
        first_window=chance.choice([1, 4, 64]),
        interrupts=seed % 8 == 1,
        first_checked=chance.choice([0, 1, 1, 3]),
        by_nodes=seed % 3 == 0,
        curriculum=(None, "skip", "learnability")[seed // 2 % 3],
        sessions=sessions,
        verify_first=seed % 4 < 2,
    )
    possible = [move for move in MOVES if scorer_fails or move is not SCORING] + [FAST_NODES] * fast_nodes
    possible += [OPERATING] * operating
    possible += SESSIONS if sessions else []
    for _ in range(moves):
        weights = [weight for weight, _ in possible]
        chance.choices(possible, weights)[0][1](world, chance)
        world.books_are_right()
        world.admission_is_kept()
        world.a_restart_changes_nothing()
    world.teardown()
    return world


def test_long_walks_meet_every_end() -> None:
    """The random walks must reach what they are made to test: together, they must meet every end of a rollout and every
    kind of continuation.
    """
    ends, gone_on, mixed = set(), set(), set()
    all_ends = {*USEFUL, *DropReason} - {DropReason.RUN_ENDED}
    # Three ways: another node continues a rollout that is still held or was returned, or the same node gets it again.
    all_ways = {("", False), (DropReason.RETURNED, False), ("", True)}
    # The first five walks together suffice; the others are tried in case a change of the coordinator alters the walks.
    walks = [(26, 0), (21, 0), (33, 0), (36, 0), (38, 99), *((seed, 6 * (seed % 2)) for seed in range(20, 52))]
    for seed, sessions in walks:
        world = walk(seed, moves=60, sessions=sessions)
        ends |= {row.end for row in world.rows.values()} - {DropReason.RUN_ENDED}
        gone_on |= set(world.gone_on)
        mixed |= set(world.mixed)
        if (ends, gone_on, mixed) == (all_ends, all_ways, {False, True}):
            return
    raise AssertionError(f"met {ends}, {gone_on}, {mixed}")


def test_walks_meet_all_outcomes_of_operator_requests() -> None:
    met: set[tuple[str, ActionOutcome]] = set()
    never = {("learning_rate", ActionOutcome.REFUSED), ("spend_cap_per_hour", ActionOutcome.REFUSED)}
    all_outcomes = {
        (what, outcome) for what, _ in ASKED for outcome in (ActionOutcome.DONE, ActionOutcome.REFUSED)
    } - never
    for seed in (76, 62, 77, *range(60, 92)):  # The first three seeds together suffice.
        met |= walk(seed, moves=40, operating=8).met_outcomes
        if met == all_outcomes:
            return
    raise AssertionError(f"met {met}")


def test_walks_with_checks_by_nodes_meet_all_check_results() -> None:
    met: set[str] = set()
    for seed in range(3, 99, 3):
        world = walk(seed, moves=60)
        met |= {row.checked for row in world.rows.values()} if world.num_opinions else set()
        if Checked.PASSED in met:
            return
    raise AssertionError(f"met {met}")


def test_walks_with_sessions_meet_every_loss() -> None:
    met: set[str] = set()
    for seed in (30, 38, *range(30, 60)):  # The first two together suffice.
        world = walk(seed, moves=60, sessions=(1, 6, 99)[seed % 3])
        met |= world.met_losses | {f"{note.losses} losses" for note in world.noted.values()}
        if met >= {*LOSSES, "0 losses", "1 losses"}:
            return
    raise AssertionError(f"met {met}")


def test_walks_with_a_curriculum_leave_problems_out() -> None:
    assert any(walk(seed, moves=40).num_left_out for seed in range(10))


def test_walks_with_fast_nodes_meet_every_number_of_steps_trained_unseen() -> None:
    met: set[int] = set()
    for number in (9, 11, 10, *range(24, 0, -1)):  # The first three seeds together suffice.
        met.add(walk(4 * number, moves=60, fast_nodes=True).most_unseen)
        if met == {0, 1, 2}:
            return
    raise AssertionError(f"met {met}")


@pytest.mark.parametrize("seed", [seed for seed in range(2000, 2012) if seed % 4 > 1])
def test_lock_step_batches_do_not_depend_on_faults(seed: int) -> None:
    sessions = seed % 3
    calm = walk(seed, moves=0, scorer_fails=False, sessions=sessions)
    eventful = walk(seed, moves=50, scorer_fails=False, sessions=sessions)
    assert eventful.num_left_out == calm.num_left_out
    assert {step: plan.group_ids for step, plan in eventful.planned.items()} == {
        step: plan.group_ids for step, plan in calm.planned.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1024))
def test_longer_walks(seed: int) -> None:
    walk(seed, moves=250, sessions=(0, 0, 1, 7)[seed // 2 % 4])


def _run(examples: int, steps: int, phases: tuple[Phase, ...]) -> None:
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=phases,
            report_multiple_bugs=False,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


def test_any_world() -> None:
    _run(examples=12, steps=30, phases=(Phase.generate,))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_many_worlds() -> None:
    _run(examples=100, steps=80, phases=(Phase.generate, Phase.shrink))
