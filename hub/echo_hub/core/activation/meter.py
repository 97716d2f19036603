"""Accrued cost of active nodes: price per hour times the time for which a node was connected and active.

A node's cost is recorded every `ACCRUE_S` seconds (less often in large fleets, where `A_SECOND` nodes are recorded per
second), and when it stops being active. A killed hub loses at most the unrecorded part.
"""

from __future__ import annotations

from collections import OrderedDict
from math import fsum, inf
from typing import Final

from echo_hub.core.accounting.effects import CostAccrued, NodeCost

ACCRUE_S: Final = 5.0
"""Shortest time between two records of a node's cost, in seconds."""
A_SECOND: Final = 100
"""Number of nodes whose cost is recorded per second, if the fleet is large."""
AT_ONCE: Final = 256
"""Maximum number of nodes in one record."""
LONGEST_S: Final = 60.0
"""Maximum number of seconds charged in one record. A longer gap between records means that the hub's computer slept."""


class CostMeter:
    """Adds up the cost of each active node. The node whose cost was recorded longest ago is recorded next."""

    def __init__(self) -> None:
        self._running: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Price in dollars per hour, and start of the time that is not recorded yet, by node."""
        self._ended: list[NodeCost] = []
        self._due_at = inf

    def __len__(self) -> int:
        return len(self._running)

    @property
    def per_hour(self) -> float:
        """Return the total price of all active nodes, in dollars per hour."""
        return fsum(price for price, _ in self._running.values())

    @property
    def due_at(self) -> float:
        """Return the time at which `take` will have costs to record; -inf = now."""
        return -inf if self._ended else self._due_at

    def begin(self, node_id: str, per_hour: float, now: float) -> None:
        self._running[node_id] = (per_hour, now)
        self._running.move_to_end(node_id)
        self._due_at = min(self._due_at, now + self._period_s)

    def end(self, node_id: str, now: float) -> None:
        """Stop charging for a node. Does nothing if the node is not active."""
        running = self._running.pop(node_id, None)
        if running is not None:
            self._ended.append(_cost(node_id, *running, now))
        if not self._running:
            self._due_at = inf

    def take(self, now: float) -> CostAccrued | None:
        """Return the due costs; None: no cost is due."""
        costs, self._ended = self._ended, []
        period_s = self._period_s
        while self._running and len(costs) < AT_ONCE:
            node_id, (per_hour, since) = next(iter(self._running.items()))
            if now < since:  # The clock was set back.
                self._restart_clock(now)
                break
            if now < since + period_s:
                break
            costs.append(_cost(node_id, per_hour, since, now))
            self._running[node_id] = (per_hour, now)
            self._running.move_to_end(node_id)
        first = next(iter(self._running.values()), None)
        self._due_at = inf if first is None else first[1] + period_s
        return CostAccrued(nodes=tuple(costs)) if costs else None

    def _restart_clock(self, now: float) -> None:
        """Move start times after `now` back to `now`: the clock was set back, and no time may be charged twice."""
        for node_id, (per_hour, since) in self._running.items():
            self._running[node_id] = (per_hour, min(since, now))

    @property
    def _period_s(self) -> float:
        return max(ACCRUE_S, len(self._running) / A_SECOND)


def _cost(node_id: str, per_hour: float, since: float, now: float) -> NodeCost:
    active_s = min(LONGEST_S, max(0.0, now - since))
    return NodeCost(node_id=node_id, active_s=active_s, dollars=per_hour * active_s / 3600)
