from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from echo_hub.views import beside
from echo_hub.views.beside import REST, ReadBeside
from echo_shared.errors import StorageError

PATIENCE_S = 30.0


class Books:
    """Counts the reads. Each read returns its thread, and a test can block reads."""

    def __init__(self) -> None:
        self.num_read = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.broken = False

    def read(self, page: int = 0) -> tuple[int, int, int]:
        self.may_go_on.wait(PATIENCE_S)
        self.num_read += 1
        if self.broken:
            raise StorageError("The disk is full.")
        return self.num_read, page, threading.get_ident()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    passed = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    return passed


@pytest.fixture
def takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "QUICK_S", -1.0)
    monkeypatch.setattr(beside, "REST", 0.0)


def until(found: Callable[[], bool]) -> None:
    began_s = time.perf_counter()
    while not found():
        assert time.perf_counter() < began_s + PATIENCE_S


def test_a_quick_read_is_done_by_its_caller_when_due(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "QUICK_S", 1e9)
    monkeypatch.setattr(beside, "REST", 0.0)
    books = Books()
    reading = ReadBeside(books.read, every_s=10.0, name="test")
    here = threading.get_ident()
    assert reading.newest(3) == reading.newest(4) == (1, 3, here)
    clock[0] += 10.0
    assert reading.newest(5) == (2, 5, here)


@pytest.mark.usefixtures("takes_long")
def test_a_slow_read_runs_in_the_background_and_callers_get_the_last_result(clock: list[float]) -> None:
    books = Books()
    reading = ReadBeside(books.read, every_s=10.0, name="test")
    first = reading.newest()
    clock[0] += 10.0
    books.may_go_on.clear()
    assert reading.newest(1) is first and reading.newest(2) is first
    books.may_go_on.set()
    until(lambda: reading.newest(3) is not first)
    found, page, thread = reading.newest(4)
    assert (found, page) == (2, 1) and thread != threading.get_ident()
    assert books.num_read == 2, "one read at a time, and no sooner than it is due again"


def test_a_slower_read_is_repeated_less_often(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "QUICK_S", 1e9)
    processor_s = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: processor_s[0])
    books = Books()

    def read() -> int:
        processor_s[0] += 0.5
        return books.read()[0]

    reading = ReadBeside(read, every_s=1.0, name="test")
    assert reading.newest() == 1
    clock[0] += REST * 0.5 - 0.01
    assert reading.newest() == 1
    clock[0] += 0.02
    assert reading.newest() == 2


def test_nothing_is_asked_for_again_at_once(clock: list[float]) -> None:
    found: list[int | None] = [None, None, 7, 8]
    reading = ReadBeside(lambda: found.pop(0), every_s=10.0, name="test")
    assert [reading.newest() for _ in range(4)] == [None, None, 7, 7]


@pytest.mark.usefixtures("takes_long")
def test_a_failed_read_raises_and_is_retried(clock: list[float]) -> None:
    books = Books()
    reading = ReadBeside(books.read, every_s=0.0, name="test")
    first = reading.newest()
    books.broken = True
    with pytest.raises(StorageError, match="disk is full"):
        until(lambda: reading.newest() is not first)
    books.broken = False
    until(lambda: reading.newest() is not first)


def test_a_first_reading_that_fails_is_reported_too() -> None:
    books = Books()
    books.broken = True
    reading = ReadBeside(books.read, every_s=0.0, name="test")
    with pytest.raises(StorageError, match="disk is full"):
        reading.newest()
    books.broken = False
    assert reading.newest()[0] == 2
