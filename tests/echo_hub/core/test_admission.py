from __future__ import annotations

import pytest

from echo_hub.core.admission import SortedIds, oldest_useful_version, room, staleness
from echo_hub.core.settings import CoordinatorSettings


def settings(mode: str, max_staleness: int, steps: int = 100) -> CoordinatorSettings:
    return CoordinatorSettings(
        mode=mode,  # type: ignore[arg-type]
        steps=steps,
        groups_per_step=10,
        group_size=4,
        max_staleness=max_staleness,
        deadline_s=1.0,
    )


def test_staleness_counts_optimizer_steps() -> None:
    assert staleness(5, 5) == 0
    assert staleness(5, 3) == 2


@pytest.mark.parametrize(
    ("max_staleness", "trained", "version", "live", "expected"),
    [
        (0, 0, 0, 0, 10),
        (0, 0, 0, 10, 0),
        (2, 0, 0, 0, 30),
        (2, 5, 5, 0, 30),  # What was consumed is gone: the rule is the same at any step.
        (2, 5, 4, 0, 20),  # Version 4 is good until step 7.
        (2, 5, 2, 0, 0),
        (2, 5, 5, 35, 0),  # More than allowed (the bound was lowered): never negative.
    ],
)
def test_room_is_what_the_bound_leaves(
    max_staleness: int, trained: int, version: int, live: int, expected: int
) -> None:
    got = room(settings("async", max_staleness), trained_steps=trained, lease_version=version, live_groups=live)
    assert got == expected


def test_nothing_is_opened_for_steps_that_will_not_come() -> None:
    assert room(settings("async", 5, steps=7), trained_steps=5, lease_version=5, live_groups=8) == 12
    assert room(settings("async", 5, steps=7), trained_steps=7, lease_version=7, live_groups=0) == 0


def test_only_async_mode_has_a_bound_above_zero() -> None:
    for mode in ("sequential", "colocated"):
        assert room(settings(mode, 5), trained_steps=3, lease_version=3, live_groups=0) == 10
        assert oldest_useful_version(settings(mode, 5), next_step=4) == 3


def test_oldest_useful_version_follows_the_place_in_the_queue() -> None:
    two = settings("async", 2)
    assert oldest_useful_version(two, next_step=1) == 0
    assert oldest_useful_version(two, next_step=6) == 3
    assert oldest_useful_version(two, next_step=6, position=9) == 3
    assert oldest_useful_version(two, next_step=6, position=10) == 4


def test_sorted_ids() -> None:
    ids = SortedIds([5, 1])
    for group_id in (3, 3, 9):
        ids.add(group_id)
    ids.discard(5)
    ids.discard(6)
    assert (len(ids), ids[0], ids.first(2), ids.position(9)) == (3, 1, (1, 3), 2)
    assert 3 in ids and 5 not in ids and 100 not in ids
