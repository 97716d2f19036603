import time

import pytest

from echo_node.host.clock import read_clocks, running_s


def test_the_clock_never_goes_back_and_includes_the_systems_time() -> None:
    before, began = running_s(), time.monotonic()
    while time.monotonic() - began < 0.01:
        assert running_s() >= before
    assert running_s() - before >= 0.01


def test_both_are_read() -> None:
    reading = read_clocks()
    assert reading.wall == pytest.approx(time.time(), abs=60) and 0 < reading.running <= running_s()
