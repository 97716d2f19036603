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
LEAST: Final = 4
"""One of so many rollouts of the base they may hold whatever was lost; one rollout in any case."""
LOST: Final = 2
"""What a rollout that did not come back costs, in such that did."""
USED: Final = 2
"""Earned is at most so many times what they hold."""
LUMP: Final = 16
"""Once they hold all that they may, they are given more when one of so many of these is free: to look for a stranger
with each that comes back costs more than it brings."""


class Strangers:
    """All counts are of rollouts that are held within their deadlines. `in_flight`: by strangers; `is_full`: these are
    given nothing at present."""

    def __init__(self, *, base: int) -> None:
        self._base = base
        self._earned = 0
        self._all_in_flight = 0
        self.in_flight = 0
        self.is_full = False

    @property
    def may_hold(self) -> int:
        """Rollouts, where other nodes are there too."""
        base = self._share
        return max(1, base // LEAST, base + self._earned)

    def count(self, num_rollouts: int, *, is_stranger: bool = True) -> bool:
        """They, or the others, hold so many more, or fewer. Whether they are given something again."""
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
        """One of them has returned its first rollout, and is none any more."""
        self._earned = min(self._earned + 1, USED * self.in_flight)
        self._note_fullness()

    def lost(self) -> None:
        """A rollout of one of them did not come back in the time in which others would have it back."""
        self._earned = max(self._earned - LOST, -self._share)
        self._note_fullness()

    @property
    def _share(self) -> int:
        """The base."""
        share = self._all_in_flight // UNPROVEN_SHARE
        return share if share > self._base else self._base

    def _note_fullness(self) -> None:
        limit = self.may_hold
        if self.in_flight >= limit:
            self.is_full = True
        elif self.in_flight <= limit - max(1, limit // LUMP):
            self.is_full = False
