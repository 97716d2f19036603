"""The coordinator says when it is to be told the time."""

from __future__ import annotations

from math import inf

import pytest

from echo_hub.simulator.ticking import next_tick


class _Due:
    def __init__(self, due: float | None) -> None:
        self._due = due

    def due_at(self) -> float | None:
        return self._due


@pytest.mark.parametrize(("due", "expected"), [(7.5, 7.5), (None, inf)])
def test_the_coordinator_says_when_it_is_told_the_time(due: float | None, expected: float) -> None:
    assert next_tick(_Due(due), 3.0) == expected


def test_the_coordinator_is_told_the_time_each_second_where_it_does_not_say() -> None:
    assert next_tick(object(), 3.0) == 4.0


def test_the_time_goes_on_even_where_the_same_moment_is_due_again() -> None:
    assert next_tick(_Due(3.0), 3.0) > 3.0
