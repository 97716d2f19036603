"""Cases of the hub's garbage collection. `test_garbage` runs them in a separate process."""

from __future__ import annotations

import gc
import weakref
from math import inf

import pytest

from echo_hub.driving import garbage
from echo_hub.driving.garbage import EVERY, LEAST_GROWTH, MOST_GROWTH, SMALL_GROWTH, Garbage


@pytest.fixture(autouse=True)
def _unfreeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the real `gc.unfreeze`, which tests/conftest.py replaces for all other tests."""
    monkeypatch.setattr(gc, "unfreeze", gc.unfreeze.__wrapped__)  # type: ignore[attr-defined]


class Knot:
    """A reference cycle, which only the garbage collector can free."""

    def __init__(self) -> None:
        self.me = self


def num_looked_through() -> int:
    return len(gc.get_objects())


def test_old_objects_are_not_scanned_again() -> None:
    """Each of 100 rounds replaces 1,000 old objects by new ones. The hub's collector may scan only the new objects;
    Python's own collector would sometimes scan all 100,000."""
    with Garbage() as collector:
        kept = [[number] for number in range(100_000)]
        most = 0
        for start in range(0, 100_000, 1_000):
            kept[start : start + 1_000] = [[number] for number in range(1_000)]
            collector.handled(EVERY)
            most = max(most, num_looked_through())
        assert most < 10_000 < len(kept)
    assert num_looked_through() > len(kept), "afterwards they are scanned again"


def test_young_cycles_are_freed_after_a_number_of_events() -> None:
    with Garbage() as collector:
        dead = weakref.ref(Knot())
        collector.handled(EVERY - 1)
        assert dead() is not None
        collector.handled(1)
        assert dead() is None


class Memory:
    """Scripted memory use of the process, and scripted free memory of the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own, self.left = 2**30, 2**40
        self._monkeypatch = monkeypatch
        self.is_soon_looked_through(False)
        monkeypatch.setattr(garbage, "own_bytes", lambda pid: self.own)
        monkeypatch.setattr(garbage, "left_bytes", lambda: self.left)

    def is_soon_looked_through(self, is_soon: bool) -> None:
        self._monkeypatch.setattr(garbage, "SOON_S", inf if is_soon else -1.0)
        self._monkeypatch.setattr(garbage, "SHARE", inf)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def old_knot(collector: Garbage) -> weakref.ref[Knot]:
    """Return a weak reference to an old cycle that is already garbage."""
    knot = Knot()
    collector.handled(EVERY)
    return weakref.ref(knot)


def test_at_a_quiet_moment_old_cycles_are_freed_if_memory_has_grown(memory: Memory) -> None:
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += LEAST_GROWTH - 1
        collector.quiet()
        assert dead() is not None, "too little growth"
        memory.own += 1
        collector.quiet()
        assert dead() is None
        dead = old_knot(collector)
        collector.quiet()
        assert dead() is not None, "no growth since then"


def test_a_busy_hub_collects_only_if_memory_is_short(memory: Memory) -> None:
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += MOST_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is not None, "the hub's own growth is no reason"
        memory.left = MOST_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is None
        dead = old_knot(collector)
        memory.left = 0
        memory.own += LEAST_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is not None, "other processes took the memory"
        memory.own += 1
        collector.handled(EVERY)
        assert dead() is None


def test_a_small_busy_hub_collects_after_some_growth(memory: Memory) -> None:
    memory.is_soon_looked_through(True)
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += SMALL_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is not None, "too little growth"
        memory.own += 1
        collector.handled(EVERY)
        assert dead() is None
        dead = old_knot(collector)
        assert dead() is not None, "no growth since then"


def test_looking_through_takes_a_share_of_the_work_at_most(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.is_soon_looked_through(True)
    monkeypatch.setattr(garbage, "SHARE", 0.05)
    monkeypatch.setattr(garbage.time, "thread_time", iter([0.0, 0.1, 2.0, 2.2, 2.3, 2.4]).__next__)
    with Garbage() as collector:  # A full collection, from 0.0 to 0.1 s of the scripted clock.
        dead = old_knot_of(collector)
        memory.own += SMALL_GROWTH
        collector.handled(EVERY)  # At 2.0 s.
        assert dead() is not None, "after 0.1 s of collection, 2 s must pass"
        collector.handled(EVERY)  # At 2.2 s.
        assert dead() is None


def old_knot_of(collector: Garbage) -> weakref.ref[Knot]:
    """Like `old_knot`, but without growth of memory and without reading the clock."""
    knot = Knot()
    gc.collect(1)
    gc.freeze()
    return weakref.ref(knot)


def test_a_process_in_a_container_does_not_grow_without_limit(memory: Memory) -> None:
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += MOST_GROWTH
        collector.handled(EVERY)
        assert dead() is None


def test_nothing_is_left_behind() -> None:
    with pytest.raises(KeyError), Garbage():
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_freeze_count() == 0
