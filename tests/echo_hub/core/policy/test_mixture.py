from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from echo_hub.core.accounting.groups import LeasedRollout, RolloutGroup, Slot
from echo_hub.core.policy.mixture import BLOCK, GroupPlace, Mixture, TaskTally, TrainedTask, quotas
from echo_shared.records.run import TaskFigures


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ([1.0], (1_000,)),
        ([1.0, 1.0, 1.0], (334, 333, 333)),
        ([3.0, 0.0, 1.0], (750, 0, 250)),
        ([1e6, 1e-9, 1e-9], (998, 1, 1)),
        ([0.0, 5.0], (0, 1_000)),
    ],
)
def test_shares_of_a_block(weights: list[float], found: tuple[int, ...]) -> None:
    assert quotas(weights) == found and sum(found) == BLOCK


def test_a_run_without_tasks_has_no_groups() -> None:
    assert quotas([]) == () and Mixture.of(7, []).quotas == ()


def test_every_block_has_each_tasks_share_and_each_number_comes_once() -> None:
    mixture = Mixture.of(7, [5, 3, 0, 2])
    places = [mixture.place(group_id) for group_id in range(3 * BLOCK)]
    for block in range(3):
        of_block = Counter(place.task for place in places[block * BLOCK : (block + 1) * BLOCK])
        assert of_block == {0: 500, 1: 300, 3: 200}
    for task, share in ((0, 500), (1, 300), (3, 200)):
        assert sorted(place.number for place in places if place.task == task) == list(range(3 * share))


def test_orders_differ_between_blocks_and_seeds() -> None:
    one, other = Mixture.of(0, [1, 1]), Mixture.of(1, [1, 1])

    def tasks(mixture: Mixture, block: int) -> list[int]:
        return [mixture.place(block * BLOCK + at).task for at in range(100)]

    assert len({tuple(tasks(mixture, block)) for mixture in (one, other) for block in (0, 1)}) == 4
    assert 30 < sum(tasks(one, 0)) < 70, "a task's groups are spread over the block"


def test_a_task_that_is_alone_has_all_groups_in_order() -> None:
    assert [Mixture.of(3, [0.5]).place(group_id) for group_id in (0, 10**9)] == [GroupPlace(0, 0), GroupPlace(0, 10**9)]


MIXTURE = Mixture.of(0, [1, 1, 0])
TASKS = (TrainedTask(key="sums"), TrainedTask(key="games", solved_at=10.0), TrainedTask(key="exam"))


def of_task(task: int, count: int) -> list[int]:
    return [group_id for group_id in range(100) if MIXTURE.place(group_id).task == task][:count]


def group(group_id: int, *rewards: float) -> RolloutGroup:
    owner: Any = None
    slots = [
        Slot(
            winner=LeasedRollout(
                rollout_id="", lease_id=0, node_id="", group_id=group_id, index=0, policy_version=0, reward=reward
            )
        )
        for reward in rewards
    ]
    return RolloutGroup(group_id, 0, slots, owner)


def test_a_steps_figures_by_task() -> None:
    tally = TaskTally(MIXTURE, TASKS)
    one, two, three = of_task(0, 3)
    (game,) = of_task(1, 1)
    tally.dropped_flat(three)
    found = tally.planned([group(one, 1.0, 0.0), group(two, 1.0, 1.0), group(game, 10.0, 1.0)])
    assert found == {
        "sums": TaskFigures(num_groups=2, mean_reward=0.75, share_solved=0.75, num_flat=2),
        "games": TaskFigures(num_groups=1, mean_reward=5.5, share_solved=0.5, num_flat=0),
    }
    assert tally.planned([group(game, 1.0, 2.0)])["sums"] == TaskFigures(num_groups=0), "dropped groups count once"


def test_a_run_with_one_task_has_none() -> None:
    tally = TaskTally(None, ())
    tally.dropped_flat(3)
    assert tally.planned([group(3, 1.0, 1.0)]) == {}
