"""A node estimates the rate of its uplink from its connections; here on a simulated line with a known rate and a
queue.
"""

from dataclasses import dataclass, replace

import pytest

from echo_node.core.own_line import GROWTH, LEAST_SHARE, LOOK_S, SHARE, OwnLine
from echo_shared.wire.sent import Sent

DELAY_S = 0.06
MOST_QUEUE_S = 0.1
HEADERS = 1.08
"""Bytes that pass the line, packet headers included, for each byte that the connections count."""
FIRST = Sent(num_packets=0, num_lost=0, arrived_bytes=0, rtt_s=DELAY_S, min_rtt_s=DELAY_S)


@dataclass
class Home:
    """Four connections that send as fast as the estimate allows; other users of the line take the share `others` of its
    rate.
    """

    carries: float
    others: float = 0.0
    waiting: float = 0.0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.line = OwnLine()
        self.links = dict.fromkeys(range(4), FIRST)

    @property
    def queue_s(self) -> float:
        return self.waiting / self.carries

    def send(self, seconds: float) -> list[float]:
        """Simulate `seconds`; return the line's queue, in seconds, at each measurement."""
        queues = []
        for _ in range(round(seconds / LOOK_S)):
            rate = self.line.rate
            offered = 3 * self.carries if rate is None else HEADERS * rate
            free = (1 - self.others) * self.carries
            through = min(self.waiting + offered * LOOK_S, free * LOOK_S)
            self.waiting = min(self.waiting + offered * LOOK_S - through, MOST_QUEUE_S * self.carries)
            if self.others:
                self.waiting = MOST_QUEUE_S * self.carries
            self.look(through / HEADERS)
            queues.append(self.queue_s)
        return queues

    def look(self, arrived_bytes: float) -> None:
        self.now += LOOK_S
        each = round(arrived_bytes / len(self.links))
        self.links = {
            number: replace(sent, arrived_bytes=sent.arrived_bytes + each, rtt_s=DELAY_S + self.queue_s)
            for number, sent in self.links.items()
        }
        self.line.saw(self.links, self.now)


@pytest.mark.parametrize("carries", [1e5, 1e6, 2e7])
def test_a_full_lines_rate_is_found_and_its_queue_stays_short(carries: float) -> None:
    home = Home(carries)
    assert home.send(1.0)[0] == MOST_QUEUE_S
    queues = home.send(30.0)
    assert home.line.rate is not None
    assert 0.75 * carries < home.line.rate < carries
    assert sum(queue > MOST_QUEUE_S / 2 for queue in queues) < 0.25 * len(queues)
    assert home.waiting < MOST_QUEUE_S * carries / 2


def test_a_line_that_is_never_full_is_not_learnt() -> None:
    home = Home(1e6)
    for _ in range(50):
        home.look(2e5)
    assert home.line.rate is None


def test_a_single_links_own_queue_is_ignored() -> None:
    home = Home(1e6)
    for _ in range(50):
        home.look(2e5)
        far = replace(home.links[0], rtt_s=0.5)
        home.line.saw({**home.links, 0: far}, home.now)
    assert home.line.rate is None


def test_the_queue_of_the_only_sending_link_is_ignored() -> None:
    line, sent = OwnLine(), replace(FIRST, rtt_s=DELAY_S + MOST_QUEUE_S)
    for number in range(1, 40):
        line.saw({"idle": FIRST, "late": replace(sent, arrived_bytes=10_000 * number)}, number * LOOK_S)
    assert line.rate is None


def test_a_line_that_became_faster_is_found() -> None:
    home = Home(1e6)
    home.send(5.0)
    home.carries = 3e6
    home.send(25.0)
    assert home.line.rate is not None and home.line.rate > 0.75 * 3e6


def test_a_line_that_became_slower_is_found_at_once() -> None:
    home = Home(3e6)
    home.send(5.0)
    home.carries = 1e6
    home.send(3.0)
    assert home.line.rate is not None and home.line.rate < 1e6


def test_other_traffic_gets_the_line_down_to_a_minimum_share() -> None:
    home = Home(1e6)
    home.send(5.0)
    home.others = 0.9
    home.send(30.0)
    assert home.line.rate == pytest.approx(LEAST_SHARE * 1e6 / HEADERS, rel=0.05)


def test_little_traffic_does_not_raise_the_estimate() -> None:
    home = Home(1e6)
    home.send(1.0)
    home.waiting = 0.0
    rate = home.line.rate
    assert rate == pytest.approx(SHARE * 1e6 / HEADERS, rel=1e-3)
    for _ in range(50):
        home.look(0.1 * rate * LOOK_S)
    assert home.line.rate == rate
    home.look(0.9 * rate * LOOK_S)
    assert home.line.rate == pytest.approx(GROWTH * rate)


def test_a_time_without_sending_is_no_slow_line() -> None:
    home = Home(1e6)
    home.send(1.0)
    rate = home.line.rate
    home.now += 60.0
    home.look(2e5)
    assert home.line.rate == rate


def test_a_link_that_has_come_or_gone_does_not_count_at_once() -> None:
    home = Home(1e6)
    home.send(1.0)
    rate = home.line.rate
    home.links[9] = replace(FIRST, arrived_bytes=10**9, rtt_s=0.2)
    home.line.saw(home.links, home.now + LOOK_S)
    home.line.saw({}, home.now + 2 * LOOK_S)
    assert home.line.rate == rate
