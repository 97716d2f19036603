from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from benchmarks.dissemination.wan.emulator import HEADER_BYTES, LEAST_QUEUE_BYTES, Home, Network, Weather

SLOW, FAST = Home(up=8, down=40, delay_ms=30), Home(up=100, down=1000, delay_ms=5)
CALM = Weather(loss=0.0, jitter_ms=0.0, up_queue_ms=99.5, down_queue_ms=60.0)
PACKET_BYTES = 1_000
"""Size of the tests' packets: such a packet takes 1 ms at 8 Mbit/s."""


def frame(number: int = 0, num_bytes: int = PACKET_BYTES) -> bytes:
    return bytes(HEADER_BYTES) + b"\x45" + bytes(3) + number.to_bytes(4) + bytes(num_bytes - 8)


def number_of(sent: bytes) -> int:
    return int.from_bytes(sent[HEADER_BYTES + 4 : HEADER_BYTES + 8])


def network(weather: Weather = CALM, seed: int = 1) -> Network:
    return Network([SLOW, FAST], weather, Random(seed))


def all_of(net: Network) -> list[tuple[int, bytes, float]]:
    found = []
    while net.next_at is not None:
        at = net.next_at
        found += [(target, sent, at) for target, sent in net.deliver(at)]
    return found


def test_a_packet_takes_both_lines_and_both_delays() -> None:
    net = network()
    net.send(0, 1, frame(), 2.0)
    ((target, sent, at),) = all_of(net)
    assert (target, sent) == (1, frame())
    assert at == pytest.approx(2.0 + 0.001 + 0.030 + 0.005 + 8e-6)


def test_no_packet_arrives_before_its_delay() -> None:
    net = network()
    net.send(0, 1, frame(), 0.0)
    assert list(net.deliver(0.0360)) == []
    assert len(list(net.deliver(0.0361))) == 1


def test_an_uplink_keeps_its_rate_and_drops_packets_beyond_its_queue() -> None:
    net = network()
    for number in range(200):
        net.send(0, 1, frame(number), 0.0)
    sent = all_of(net)
    assert [number_of(one) for _, one, _ in sent] == list(range(100))
    assert net.counts == {"sent": 200, "full": 100}
    assert sent[-1][2] - sent[0][2] == pytest.approx(0.099)


def test_a_downlink_queue_is_finite_too() -> None:
    net = Network([FAST, FAST, SLOW], CALM, Random(1))
    for number in range(300):
        for source in (0, 1):
            net.send(source, 2, frame(number), number * 1e-4)  # 160 Mbit/s are offered to a link of 40 Mbit/s.
    sent = all_of(net)
    assert 0 < len(sent) < 600
    assert net.counts["full"] == 600 - len(sent)
    rate = (len(sent) - 1) * PACKET_BYTES * 8e-6 / (sent[-1][2] - sent[0][2])
    assert rate == pytest.approx(40, rel=0.01)


def test_the_slowest_line_has_room_for_some_packets() -> None:
    net = Network([Home(up=0.1, down=1, delay_ms=1), FAST], CALM, Random(1))
    for number in range(40):
        net.send(0, 1, frame(number), 0.0)
    assert len(all_of(net)) == 1 + LEAST_QUEUE_BYTES // PACKET_BYTES


def test_the_given_share_is_lost_and_the_seed_selects_the_packets() -> None:
    lossy = Weather(loss=0.01, jitter_ms=0.0, up_queue_ms=1e9, down_queue_ms=1e9)

    def survivors(seed: int) -> list[int]:
        net = network(lossy, seed)
        for number in range(20_000):
            net.send(0, 1, frame(number), 0.0)
        found = all_of(net)
        assert net.counts["lost"] == 20_000 - len(found)
        return [number_of(one) for _, one, _ in found]

    first = survivors(1)
    assert 20_000 - len(first) == pytest.approx(200, abs=60)  # 1 % of 20,000, give or take four standard deviations.
    assert first == survivors(1) != survivors(2)


def test_a_lossy_home_loses_packets_both_ways_and_other_homes_none() -> None:
    net = Network([SLOW, replace(FAST, loss=0.01), FAST], CALM, Random(1))
    for number in range(20_000):
        for source, target in ((0, 1), (1, 2), (0, 2)):
            net.send(source, target, frame(number), number * 2e-3)
    num_arrived = Counter(target for target, _, _ in all_of(net))
    assert net.counts == {"sent": 60_000, "lost": 60_000 - num_arrived.total()}
    # 1 % of 20,000, give or take four standard deviations.
    assert 20_000 - num_arrived[1] == pytest.approx(200, abs=60)
    assert 40_000 - num_arrived[2] == pytest.approx(200, abs=60), "a link between two homes without loss loses none"


def test_jitter_delays_and_never_overtakes() -> None:
    net = network(Weather(loss=0.0, jitter_ms=10.0, up_queue_ms=1e9, down_queue_ms=1e9))
    for number in range(500):
        net.send(0, 1, frame(number), number * 2e-3)
    sent = all_of(net)
    assert [number_of(one) for _, one, _ in sent] == list(range(500))
    extra = [at - number * 2e-3 - 0.036008 for number, (_, _, at) in enumerate(sent)]
    assert min(extra) < 0.001
    assert 0.008 < max(extra) <= 0.0101
