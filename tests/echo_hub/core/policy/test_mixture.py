from __future__ import annotations

from collections import Counter

import pytest

from echo_hub.core.policy.mixture import BLOCK, GroupPlace, Mixture, quotas


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
