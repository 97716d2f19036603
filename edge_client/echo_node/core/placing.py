"""Chooses the engines that sample the rollouts of a lease, on a node with several engines.

Rollouts of one lease share a prompt, whose prefill an engine computes once. So a lease stays together on an engine with
free width for all its rollouts. Otherwise all engines with free width share it, because an idle
engine costs more than a second prefill. Without free width the whole lease waits in the queue that ends first.

Example: engines A (width 8, 100 tokens/s) and B (width 8, 50 tokens/s), both idle. Lease 1
(6 rollouts) goes to A. Lease 2 (6 rollouts) goes to B, because A has free width for 2. Lease 3 (4 rollouts) is split:
2 on A, 2 on B.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Seats:
    """The capacity of one engine. `place` updates `taken`."""

    device: str
    width: int
    """Maximum number of rollouts sampled at the same time."""
    window: float
    """Maximum number of rollouts that the engine holds, the waiting ones included; inf = it takes all of them."""
    rate: float
    """Speed, in the same unit for all engines."""
    taken: int = 0
    """Number of rollouts that the engine holds."""

    @property
    def free(self) -> int:
        """Number of rollouts that the engine can start at once."""
        return int(max(0, min(self.width, self.window) - self.taken))

    @property
    def left(self) -> float:
        """Number of rollouts that the engine can still take."""
        return max(0.0, self.window - self.taken)

    def ends_after(self, count: int) -> float:
        """Return the time until the engine would have finished its rollouts and `count` further ones. The unit is the
        same for all engines.
        """
        return (self.taken + count) / self.rate


def place(count: int, engines: Iterable[Seats]) -> list[tuple[Seats, int]]:
    """Distribute `count` rollouts of one lease. Return each engine with its number of rollouts. Rollouts that fit
    nowhere wait.
    """
    known = [engine for engine in engines if engine.left]
    whole = [engine for engine in known if engine.free >= count]
    if whole:
        return [_take(min(whole, key=lambda engine: engine.ends_after(count)), count)]
    placed = []
    for engine in sorted(known, key=lambda engine: -engine.rate):
        if engine.free and count:
            placed.append(_take(engine, min(count, engine.free)))
            count -= placed[-1][1]
    fitting = [engine for engine in known if engine.left >= count]
    if count and fitting:
        placed.append(_take(min(fitting, key=lambda engine: engine.ends_after(count)), count))
    return _merged(placed)


def rates(speeds: Iterable[tuple[float, int]]) -> list[float]:
    """Return comparable speeds from (tokens per second, width) of engines. If a speed is unknown (0), the widths are
    compared.
    """
    known = list(speeds)
    if all(speed > 0 for speed, _ in known):
        return [speed for speed, _ in known]
    return [float(max(1, width)) for _, width in known]


def _take(engine: Seats, count: int) -> tuple[Seats, int]:
    assert count <= engine.left, "the window bounds the engine's work"
    engine.taken += count
    return engine, count


def _merged(placed: list[tuple[Seats, int]]) -> list[tuple[Seats, int]]:
    """Add up entries of the same engine: return one (engine, number of rollouts) for each."""
    counts: dict[str, tuple[Seats, int]] = {}
    for engine, count in placed:
        _, before = counts.get(engine.device, (engine, 0))
        counts[engine.device] = engine, before + count
    return list(counts.values())
