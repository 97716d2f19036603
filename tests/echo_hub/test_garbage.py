from __future__ import annotations

import gc
import weakref

import pytest

from echo_hub import garbage
from echo_hub.garbage import EVERY, Garbage


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


def test_old_cycles_are_freed_once_memory_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [100]
    monkeypatch.setattr(garbage, "own_bytes", lambda pid: held[0])

    def old_knot() -> weakref.ref[Knot]:
        knot = Knot()
        collector.handled(EVERY)
        return weakref.ref(knot)

    with Garbage(least_growth=50) as collector:
        dead = old_knot()
        held[0] = 199
        collector.handled(EVERY)
        assert dead() is not None, "it was old when it was let go of"
        held[0] = 200
        collector.handled(EVERY)
        assert dead() is None
        dead = old_knot()
        held[0] = 399
        collector.handled(EVERY)
        assert dead() is not None, "since then it has not doubled again"


def test_nothing_is_left_behind() -> None:
    with pytest.raises(KeyError), Garbage():
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_freeze_count() == 0
