"""What nodes that have returned nothing yet may hold together: a slow start over all of them.

Nobody knows what a stranger is worth, and keys cost nothing. So each is given one rollout until it has returned one,
and all of them together hold no more than

    base      a share of a step's rollouts, or of what all nodes hold
    earned    and one more for each stranger whose first rollout came back, two less for each rollout that did not

so that a fleet of newcomers doubles what it holds with every round, as in TCP (RFC 5681, section 3.1), and what silent
keys take is paid for: one of theirs for two that strangers return, and no more than a quarter of the base at a time
besides. What was earned lasts only as long as it is used (RFC 7661): it is no more than `USED` times what strangers
hold, or whoever was honest with many keys could save it up.
"""

from __future__ import annotations

from typing import Final

UNPROVEN_SHARE: Final = 16
"""The base is one of so many rollouts: of a step's, or of those that nodes hold."""
LOST: Final = 2
"""What a rollout that did not come back costs, in such that did."""
LEAST: Final = 4
"""One of so many rollouts of the base they may hold whatever was lost; one rollout in any case."""

LUMP: Final = 16
"""Once they hold all that they may, they are given more when one of so many of these is free: to look for a stranger
with each that comes back costs more than it brings."""
USED: Final = 2
"""Earned is at most so many times what they hold."""


class Strangers:
    """`in_flight`: rollouts that they hold within their deadlines."""

    def __init__(self, *, base: int) -> None:
        self._base = base
        self._earned = 0
        self._is_full = False
        self.in_flight = 0

    def may_hold(self, all_in_flight: int) -> int:
        """Rollouts, where other nodes are there too. `all_in_flight`: what these and all others hold."""
        base = max(self._base, all_in_flight // UNPROVEN_SHARE)
        return max(1, base // LEAST, base + self._earned)

    def may_take_more(self, all_in_flight: int) -> bool:
        """Whether they are given anything."""
        limit = self.may_hold(all_in_flight)
        if self.in_flight >= limit:
            self._is_full = True
        elif self.in_flight <= limit - max(1, limit // LUMP):
            self._is_full = False
        return not self._is_full

    def count(self, num_rollouts: int) -> None:
        """They hold so many more, or fewer."""
        self.in_flight += num_rollouts
        self._earned = min(self._earned, USED * self.in_flight)

    def returned(self) -> None:
        """One of them has returned its first rollout, and is none any more."""
        self._earned = min(self._earned + 1, USED * self.in_flight)

    def lost(self, all_in_flight: int) -> None:
        """A rollout of one of them did not come back in the time in which others would have it back."""
        base = max(self._base, all_in_flight // UNPROVEN_SHARE)
        self._earned = max(self._earned - LOST, -base)
