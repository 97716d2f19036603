import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from echo_node.host.clock import local_now, read_clocks, running_s


def test_the_clock_never_goes_back_and_includes_the_systems_time() -> None:
    before, began = running_s(), time.monotonic()
    while time.monotonic() - began < 0.01:
        assert running_s() >= before
    assert running_s() - before >= 0.01


def test_both_are_read() -> None:
    reading = read_clocks()
    assert reading.wall == pytest.approx(time.time(), abs=60) and 0 < reading.running <= running_s()


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no tzset")
@pytest.mark.parametrize("hours", [-9, 0, 5])
def test_the_time_of_day_follows_a_changed_time_zone(zone: pytest.MonkeyPatch, hours: int) -> None:
    """The machine's owner travels: a schedule belongs to the new time zone from then on."""
    for ahead in (1, hours):
        zone.setenv("TZ", f"<HERE>{-ahead}")
        assert local_now().utcoffset() == timedelta(hours=ahead)
    assert local_now().timestamp() == pytest.approx(time.time(), abs=60)
