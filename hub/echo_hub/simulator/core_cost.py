"""Cost of the coordinator itself: seconds per event, measured with a clock that the caller gives, and memory. The time
of an event includes garbage collection during it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nextafter
from types import BuiltinFunctionType, FunctionType, ModuleType

from echo_hub.core.accounting.effects import Effect
from echo_hub.core.accounting.events import Event, Tick
from echo_hub.core.coordinator import Coordinator

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""Types of objects shared by all coordinators, which `held_bytes` leaves out."""


@dataclass(slots=True, kw_only=True)
class KindCost:
    """Number of the events of one type, and their total and longest time."""

    count: int = 0
    seconds: float = 0.0
    worst_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class CoreCost:
    kinds: dict[str, KindCost] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return sum(kind.count for kind in self.kinds.values())

    @property
    def seconds(self) -> float:
        return sum(kind.seconds for kind in self.kinds.values())

    @property
    def worst(self) -> tuple[float, str]:
        """(seconds, kind) of the slowest event."""
        return max(((kind.worst_s, name) for name, kind in self.kinds.items()), default=(0.0, ""))


class MeteredCore:
    """Passes events to a coordinator and measures the time of each, including the computation of `tick_at`, its next
    wake-up."""

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self.coordinator = coordinator
        self.cost = CoreCost()
        self.handled: Callable[[int], None] = lambda num_events: None
        """Function that is called after each event; its time counts as part of the event."""
        self.tick_at = inf
        self._last_tick = 0.0
        self._clock = clock

    def start(self, now: float) -> list[Effect]:
        effects = self.coordinator.start(now)
        self._ask_for_tick()
        return effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        clock = self._clock
        began_at = clock()
        effects = self.coordinator.handle(event, now)
        if type(event) is Tick:
            self._last_tick = now
        self._ask_for_tick()
        self.handled(1)
        took_s = clock() - began_at
        name = type(event).__name__
        kind = self.cost.kinds.get(name)
        if kind is None:
            kind = self.cost.kinds[name] = KindCost()
        kind.count += 1
        kind.seconds += took_s
        if took_s > kind.worst_s:
            kind.worst_s = took_s
        return effects

    def _ask_for_tick(self) -> None:
        """Ask the coordinator for its next wake-up. It must be later than the last tick, so that virtual time
        advances."""
        due = self.coordinator.due_at()
        self.tick_at = inf if due is None else max(due, nextafter(self._last_tick, inf))


def held_bytes(root: object) -> int:
    """Return the bytes of all objects reachable from `root`, each counted once; classes and functions are skipped."""
    seen: set[int] = set()
    waiting = [root]
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total
