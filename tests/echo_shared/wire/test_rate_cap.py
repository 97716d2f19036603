import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.wire.rate_cap import BURST_S, RateCap


def test_by_hand() -> None:
    cap = RateCap(1_000)
    assert cap.delay_s(500, 100.0) == pytest.approx(0.5 - BURST_S)
    assert cap.delay_s(500, 100.0) == pytest.approx(1.0 - BURST_S)
    assert cap.delay_s(50, 200.0) == 0.0, "a burst of a tenth of a second is free"
    assert RateCap(0).delay_s(2**60, 0.0) == 0.0


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 10)), max_size=50))
def test_no_time_span_exceeds_the_rate(rate: int, moves: list[tuple[int, float]]) -> None:
    cap, now, gone = RateCap(rate), 1_000.0, 0
    begin = now
    for count, pause_s in moves:
        now += cap.delay_s(count, now)
        gone += count
        assert gone <= (now - begin + BURST_S) * rate * (1 + 1e-9) + 1e-3
        now += pause_s
