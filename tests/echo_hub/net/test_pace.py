from echo_hub.net.pace import BURST_S, BYTES_PER_S, MESSAGES_PER_S, ConnectionPace


def test_a_node_that_works_never_waits() -> None:
    pace = ConnectionPace(now=0.0)
    at = 0.0
    for _ in range(50_000):  # A busy node sends about 500 rollouts and 500 streamed parts per second, each of 1 kB.
        at += 1 / (0.99 * MESSAGES_PER_S)
        assert pace.wait_s(1_000, now=at) == 0


def test_a_burst_passes_at_once_and_later_requests_at_the_rate() -> None:
    pace = ConnectionPace(now=0.0)
    waits = [pace.wait_s(1, now=0.0) for _ in range(int(MESSAGES_PER_S * BURST_S) + 100)]
    assert not any(waits[:-100]) and all(waits[-100:])
    assert abs(waits[-1] - 100 / MESSAGES_PER_S) < 1e-9
    assert pace.wait_s(1, now=1.0) == 0, "the delay has passed"


def test_bytes_count_as_messages_do() -> None:
    pace, size = ConnectionPace(now=0.0), 4 * 2**20
    waits = [pace.wait_s(size, now=0.0) for _ in range(int(BYTES_PER_S * BURST_S / size) + 2)]
    assert not any(waits[:-2]) and waits[-2:] == [0.5, 1.0]


def test_no_pause_is_long_and_silence_saves_up_no_more_than_a_burst() -> None:
    pace = ConnectionPace(now=0.0)
    assert pace.wait_s(2**40, now=0.0) == 2.0
    pace = ConnectionPace(now=0.0)
    pace.wait_s(0, now=1e6)
    assert any(pace.wait_s(0, now=1e6) for _ in range(int(MESSAGES_PER_S * BURST_S)))
