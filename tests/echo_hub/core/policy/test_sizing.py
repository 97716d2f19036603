from __future__ import annotations

import pytest

from echo_hub.core.policy.sizing import Outlook, oldest_useful_version, room
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


def room_for_tens(chosen: CoordinatorSettings, next_step: int, version: int, waiting: int) -> int:
    outlook = Outlook(next_step=next_step, next_batch=10, later_batches=10)
    return room(chosen, outlook, lease_version=version, waiting_groups=waiting)


@pytest.mark.parametrize(
    ("max_staleness", "trained", "version", "waiting", "expected"),
    [
        (0, 0, 0, 0, 10),
        (0, 0, 0, 10, 0),
        (2, 0, 0, 0, 30),
        (2, 5, 5, 0, 30),  # Consumed groups no longer count, so the limit is the same at any step.
        (2, 5, 4, 0, 20),  # Version 4 may be used up to step 7.
        (2, 5, 2, 0, 0),
        # More groups are open than allowed, because the staleness bound was lowered: the answer is 0, not negative.
        (2, 5, 5, 35, 0),
    ],
)
def test_the_number_of_groups_to_open_follows_the_bound(
    max_staleness: int, trained: int, version: int, waiting: int, expected: int
) -> None:
    assert room_for_tens(settings("async", max_staleness), trained + 1, version, waiting) == expected


def test_nothing_is_opened_for_steps_that_will_not_come() -> None:
    assert room_for_tens(settings("async", 5, steps=7), 6, 5, 8) == 12
    assert room_for_tens(settings("async", 5, steps=7), 8, 7, 0) == 0


def test_steps_that_take_less_leave_less_room() -> None:
    two = settings("async", 2)
    outlook = Outlook(next_step=1, next_batch=6, later_batches=4)
    assert room(two, outlook, lease_version=0, waiting_groups=5) == 6 + 4 + 4 - 5
    assert [outlook.step_of(position) for position in (0, 5, 6, 9, 10)] == [1, 1, 2, 2, 3]


def test_no_groups_are_opened_for_steps_of_unknown_size() -> None:
    outlook = Outlook(next_step=1, next_batch=6, later_batches=0)
    assert room(settings("async", 5), outlook, lease_version=0, waiting_groups=0) == 6


def test_only_async_mode_has_a_bound_above_zero() -> None:
    for mode in ("sequential", "colocated"):
        assert room_for_tens(settings(mode, 5), 4, 3, 0) == 10
        assert oldest_useful_version(settings(mode, 5), 4) == 3


def test_oldest_useful_version_follows_the_step() -> None:
    two = settings("async", 2)
    assert [oldest_useful_version(two, step) for step in (1, 3, 4, 6)] == [0, 0, 1, 3]
