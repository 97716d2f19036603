from hypothesis import given
from hypothesis import strategies as st

from echo_node.core.backoff import backoff_s


def test_doubles_up_to_the_limit() -> None:
    assert [backoff_s(n, 0.0, first_s=1.0, limit_s=10.0) for n in range(6)] == [1, 2, 4, 8, 10, 10]


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_takes_at_most_half(attempt: int, jitter: float) -> None:
    full = backoff_s(attempt, 0.0)
    assert full / 2 <= backoff_s(attempt, jitter) <= full <= 60.0
