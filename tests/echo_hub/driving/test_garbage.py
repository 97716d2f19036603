from __future__ import annotations

import gc
import weakref
from math import inf

import pytest

from echo_hub.driving import garbage
from echo_hub.driving.garbage import EVERY, LEAST_GROWTH, MOST_GROWTH, SMALL_GROWTH, Garbage


class Knot:
    """Nothing but the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def num_looked_through() -> int:
    """Objects that the next collection of all generations looks through."""
    return len(gc.get_objects())


def test_what_is_old_is_not_looked_through_again() -> None:
    """Nor where as much is freed as is made, by which the collector itself is deceived."""
    with Garbage() as collector:
        kept = [[number] for number in range(100_000)]
        most = 0
        for start in range(0, 100_000, 1_000):
            kept[start : start + 1_000] = [[number] for number in range(1_000)]
            collector.handled(EVERY)
            most = max(most, num_looked_through())
        assert most < 10_000 < len(kept)
    assert num_looked_through() > len(kept), "and afterwards it is"


def test_young_cycles_are_freed_after_so_many_events() -> None:
    with Garbage() as collector:
        dead = weakref.ref(Knot())
        collector.handled(EVERY - 1)
        assert dead() is not None
        collector.handled(1)
        assert dead() is None


class Memory:
    """What the process has, and what the machine has left."""

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
    """A cycle that has grown old and is let go of."""
    knot = Knot()
    collector.handled(EVERY)
    return weakref.ref(knot)


def test_at_a_quiet_moment_old_cycles_are_freed_if_memory_has_grown(memory: Memory) -> None:
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += LEAST_GROWTH - 1
        collector.quiet()
        assert dead() is not None, "it is not worth it"
        memory.own += 1
        collector.quiet()
        assert dead() is None
        dead = old_knot(collector)
        collector.quiet()
        assert dead() is not None, "since then it has not grown"


def test_who_works_is_held_up_only_where_memory_runs_short(memory: Memory) -> None:
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += MOST_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is not None, "that a hub has grown is no reason"
        memory.left = MOST_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is None
        dead = old_knot(collector)
        memory.left = 0
        memory.own += LEAST_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is not None, "others have taken it"
        memory.own += 1
        collector.handled(EVERY)
        assert dead() is None


def test_a_small_hub_lets_go_of_what_strangers_have_left_behind_while_it_works(memory: Memory) -> None:
    memory.is_soon_looked_through(True)
    with Garbage() as collector:
        dead = old_knot(collector)
        memory.own += SMALL_GROWTH - 1
        collector.handled(EVERY)
        assert dead() is not None, "it is not worth it"
        memory.own += 1
        collector.handled(EVERY)
        assert dead() is None
        dead = old_knot(collector)
        assert dead() is not None, "since then it has not grown"


def test_looking_through_takes_a_share_of_the_work_at_most(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.is_soon_looked_through(True)
    monkeypatch.setattr(garbage, "SHARE", 0.05)
    monkeypatch.setattr(garbage.time, "thread_time", iter([0.0, 0.1, 2.0, 2.2, 2.3, 2.4]).__next__)
    with Garbage() as collector:  # From 0.0 to 0.1.
        dead = old_knot_of(collector)
        memory.own += SMALL_GROWTH
        collector.handled(EVERY)  # At 2.0.
        assert dead() is not None, "for 0.1 s, 2 s have to pass"
        collector.handled(EVERY)  # At 2.2.
        assert dead() is None


def old_knot_of(collector: Garbage) -> weakref.ref[Knot]:
    """As `old_knot`, where nothing has grown: the clock is not looked at."""
    knot = Knot()
    gc.collect(1)
    gc.freeze()
    return weakref.ref(knot)


def test_a_process_in_a_container_is_not_let_grow_without_end(memory: Memory) -> None:
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
