from hypothesis import given
from hypothesis import strategies as st

from echo_shared.process.backoff import Restarts, backoff_s


def test_doubles_up_to_the_limit() -> None:
    assert [backoff_s(n, 0.0, first_s=1.0, limit_s=10.0) for n in range(6)] == [1, 2, 4, 8, 10, 10]


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_takes_at_most_half(attempt: int, jitter: float) -> None:
    full = backoff_s(attempt, 0.0)
    assert full / 2 <= backoff_s(attempt, jitter) <= full <= 60.0


def restarts() -> Restarts:
    return Restarts(most=4, first_s=1.0, limit_s=3.0)


def test_each_death_in_a_row_waits_longer_up_to_the_limit_and_the_last_is_the_end() -> None:
    row = restarts()
    assert [row.died(0.0) for _ in range(4)] == [1.0, 2.0, 3.0, None]
    assert row.deaths == 4


def test_jitter_takes_up_to_half_of_the_wait() -> None:
    assert restarts().died(0.5) == 0.75


def test_success_begins_a_new_row() -> None:
    row = restarts()
    assert [row.died(0.0), row.died(0.0)] == [1.0, 2.0]
    row.succeeded()
    assert (row.deaths, row.died(0.0)) == (0, 1.0)
