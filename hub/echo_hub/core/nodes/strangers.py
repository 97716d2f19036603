"""Limits on the rollouts held by unproven nodes: all together (a slow start), and those of one origin.

Nothing is known about an unproven node (a *stranger*: no rollout of it was scored), and keys cost nothing. So each
stranger gets one small lease until it has returned a rollout. Together, strangers hold at most base + earned rollouts:

    base      1/16 of a step's rollouts, or of the rollouts held by all nodes if that is more
    earned    credit: plus one for each stranger whose first rollout was scored, minus two for each lost rollout

So the number of honest newcomers doubles with every round, as in TCP's slow start (RFC 5681, section 3.1). Strangers
that return nothing lower the limit for all: two returned rollouts pay for one lost rollout, but at least a quarter of
the base remains. Unused credit expires (RFC 7661): it never exceeds `USED` times the rollouts that strangers hold.
Otherwise an attacker could save credit with many honest keys.

An *origin* is an address, an address range, or an invite, so that all keys of one person share it. A stranger needs one
of its origin's *places* before it is offered work, and keeps it until its work is back or overdue. If no place is free,
strangers wait first come, first served. Nodes of unknown origin need no place.
"""

from __future__ import annotations

from typing import Final

from echo_hub.core.nodes.node import Node

UNPROVEN_SHARE: Final = 16
"""Divisor that gives the base of the limit for all strangers (unproven nodes) together: 1/16 of a step's rollouts, or
of the rollouts that all nodes hold, if that is more. Set by hand.
"""
LEAST: Final = 4
"""Divisor that gives the minimum limit for all strangers (unproven nodes): a quarter of the base, at least one rollout,
however many rollouts they lose. Set by hand."""
LOST: Final = 2
"""Number of first rollouts that strangers (unproven nodes) must return to make up for one lost rollout in their common
limit. Set by hand."""
USED: Final = 2
"""Largest credit that strangers (unproven nodes) can earn for their common limit, as a multiple of the rollouts that
they hold. Set by hand."""
LUMP: Final = 16
"""Once strangers (unproven nodes) hold as many rollouts as their common limit, they get work again only when 1/16 of
the limit is free. A search for a stranger after every single return would cost too much time. Set by hand."""
ORIGIN_SHARE: Final = 4
"""Divisor that gives one origin's places, the number of its strangers (unproven nodes) that may have work at once: a
quarter of the strangers' limit (`may_hold`), minimum one. Set by hand."""
FIRST_SHARE: Final = 4
"""Divisor that gives the largest first lease of one stranger (unproven node): a quarter of what strangers may hold in
addition. Set by hand."""


class Strangers:
    """Counts the rollouts that nodes hold within their deadlines, and limits those of strangers (unproven nodes).

    `in_flight`: number held by strangers. `is_full`: True while strangers get no work.
    """

    def __init__(self, *, base: int) -> None:
        self._base = base
        self._earned = 0
        self._all_in_flight = 0
        self.in_flight = 0
        self.is_full = False

    @property
    def may_hold(self) -> int:
        """Return how many rollouts all strangers (unproven nodes) together may hold while proven nodes are present."""
        base = self._share
        return max(1, base // LEAST, base + self._earned)

    @property
    def most_for_one(self) -> int:
        """Return how many rollouts the first lease of a stranger (unproven node) may have, whatever it claims."""
        return max(0, self.may_hold - self.in_flight) // FIRST_SHARE

    def count(self, num_rollouts: int, *, is_stranger: bool = True) -> bool:
        """Add `num_rollouts` (negative: remove) to the rollouts held by strangers (unproven nodes) or, otherwise, by
        proven nodes.

        Return True if strangers were at their limit and may get work again.
        """
        was_full, share = self.is_full, self._share
        self._all_in_flight += num_rollouts
        if is_stranger:
            self.in_flight += num_rollouts
            self._earned = min(self._earned, USED * self.in_flight)
        elif share == self._share:
            return False
        self._note_fullness()
        return was_full and not self.is_full

    def returned(self) -> None:
        self._earned = min(self._earned + 1, USED * self.in_flight)
        self._note_fullness()

    def lost(self) -> None:
        self._earned = max(self._earned - LOST, -self._share)
        self._note_fullness()

    @property
    def _share(self) -> int:
        share = self._all_in_flight // UNPROVEN_SHARE
        return share if share > self._base else self._base

    def _note_fullness(self) -> None:
        limit = self.may_hold
        if self.in_flight >= limit:
            self.is_full = True
        elif self.in_flight <= limit - max(1, limit // LUMP):
            self.is_full = False


class Origins:
    def __init__(self) -> None:
        self._num_taken: dict[str, int] = {}
        self._waiting: dict[str, dict[str, None]] = {}

    def enter(self, node: Node, may_hold: int) -> bool:
        """Return True if the stranger (unproven node) has or gets a place of its origin. Otherwise it waits in its
        origin's queue. `may_hold`: number of rollouts that all strangers together may hold."""
        if node.has_place or not node.origin:
            return True
        taken = self._num_taken.get(node.origin, 0)
        if taken >= max(1, may_hold // ORIGIN_SHARE):
            self._waiting.setdefault(node.origin, {})[node.node_id] = None
            return False
        self._num_taken[node.origin] = taken + 1
        node.has_place = True
        return True

    def leave(self, node: Node) -> None:
        node.has_place = False
        taken = self._num_taken.pop(node.origin) - 1
        if taken:
            self._num_taken[node.origin] = taken

    def next_waiting(self, origin: str) -> str | None:
        """Remove and return the next node that waits for a place of this origin; None: no node waits."""
        waiting = self._waiting.get(origin)
        if not waiting:
            return None
        node_id = next(iter(waiting))
        del waiting[node_id]
        if not waiting:
            del self._waiting[origin]
        return node_id
