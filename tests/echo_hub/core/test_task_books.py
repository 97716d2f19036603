from __future__ import annotations

from typing import Any

from echo_hub.core.accounting.groups import LeasedRollout, RolloutGroup, Slot
from echo_hub.core.policy.mixture import Mixture, TrainedTask
from echo_hub.core.task_books import TaskBooks
from echo_shared.records.run import TaskFigures

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
    books = TaskBooks(MIXTURE, TASKS)
    one, two, three = of_task(0, 3)
    (game,) = of_task(1, 1)
    books.dropped_flat(three)
    found = books.planned([group(one, 1.0, 0.0), group(two, 1.0, 1.0), group(game, 10.0, 1.0)])
    assert found == {
        "sums": TaskFigures(num_groups=2, mean_reward=0.75, share_solved=0.75, num_flat=2),
        "games": TaskFigures(num_groups=1, mean_reward=5.5, share_solved=0.5, num_flat=0),
    }
    assert books.planned([group(game, 1.0, 2.0)])["sums"] == TaskFigures(num_groups=0), "dropped groups count once"


def test_a_run_with_one_task_has_none() -> None:
    books = TaskBooks(None, ())
    books.dropped_flat(3)
    assert books.planned([group(3, 1.0, 1.0)]) == {}
