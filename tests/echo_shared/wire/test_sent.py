import pytest

from echo_shared.wire.sent import Sent


@pytest.mark.parametrize(
    ("rtt_s", "min_rtt_s", "queues"), [(0.1, 0.08, False), (0.11, 0.08, True), (0.02, 0.0, False), (0.24, 0.2, False)]
)
def test_a_little_jitter_is_no_queue(rtt_s: float, min_rtt_s: float, queues: bool) -> None:
    assert Sent(num_packets=0, num_lost=0, arrived_bytes=0, rtt_s=rtt_s, min_rtt_s=min_rtt_s).queues is queues
