"""Limit on the rollouts held by all unproven nodes together: a slow start.

The quality of an unproven node (a stranger) is unknown, and keys cost nothing. So each stranger gets one rollout until
one returns. Together, strangers hold at most base plus earned rollouts:

    base      a fraction of a step's rollouts, or of the rollouts held by all nodes
    earned    plus one for each stranger's returned first rollout, minus two for each lost rollout

So honest newcomers double their total with every round, as in TCP (RFC 5681, section 3.1). Silent keys cost honest
ones: two returned rollouts pay for one lost rollout, and losses leave at least a quarter of the base. Earned credit
expires unless used (RFC 7661): it is capped at `USED` times the rollouts held. Otherwise an attacker could save credit
with many honest keys.
"""

from __future__ import annotations

from typing import Final

UNPROVEN_SHARE: Final = 16
"""Divisor of the base: 1/16 of a step's rollouts, or of all held rollouts."""
LEAST: Final = 4
"""Divisor of the guaranteed minimum: losses leave at least a quarter of the base and one rollout."""
LOST: Final = 2
"""Returned rollouts that pay for one lost rollout."""
USED: Final = 2
"""Cap of earned credit, as a multiple of the rollouts held by strangers."""
LUMP: Final = 16
"""Hysteresis of `is_full`: work resumes once 1/16 of the limit is free.

Looking for a stranger after every single return would cost more than it brings.
"""


class Strangers:
    """Counts of rollouts held within their deadlines.

    `in_flight`: held by strangers. `is_full`: strangers get no work at present.
    """

    def __init__(self, *, base: int) -> None:
        self._base = base
        self._earned = 0
        self._all_in_flight = 0
        self.in_flight = 0
        self.is_full = False

    @property
    def may_hold(self) -> int:
        """Return the limit for all strangers while other nodes are present."""
        base = self._share
        return max(1, base // LEAST, base + self._earned)

    def count(self, num_rollouts: int, *, is_stranger: bool = True) -> bool:
        """Add `num_rollouts` (negative: remove) held by strangers or, otherwise, by proven nodes.

        Return True if strangers may get work again.
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
        """Note that a stranger returned its first rollout and is proven now."""
        self._earned = min(self._earned + 1, USED * self.in_flight)
        self._note_fullness()

    def lost(self) -> None:
        """Note that a stranger's rollout did not return in the time other nodes need."""
        self._earned = max(self._earned - LOST, -self._share)
        self._note_fullness()

    @property
    def _share(self) -> int:
        """Return the base."""
        share = self._all_in_flight // UNPROVEN_SHARE
        return share if share > self._base else self._base

    def _note_fullness(self) -> None:
        limit = self.may_hold
        if self.in_flight >= limit:
            self.is_full = True
        elif self.in_flight <= limit - max(1, limit // LUMP):
            self.is_full = False
