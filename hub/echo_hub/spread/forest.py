"""Trees of one broadcast: stars in a small fleet, a deep tree per piece in a large one.

A deep tree takes into account how much each node still has to send (`trees`). So no node falls behind for long: if it
is slower than assumed, later trees leave more of the work to other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log
from statistics import fmean
from typing import Final

from echo_hub.spread.members import Member
from echo_hub.spread.trees import FAN_OUT, HOP_S, MOST_IN_A_STAR, Tree, bits, grow, star
from echo_hub.spread.way_choice import ASSUMED_UPLINK_BYTES_S
from echo_hub.spread.windows import RELAY_SLACK_S, BroadcastPaths, Handing

LOOK_S: Final = 0.25
"""Seconds between updates of the list of nodes that can hand pieces on, and of their speeds."""
NODES_PER_SHARE: Final = 4_096
"""A fleet with this number of additional nodes lets one more piece use the same tree, because growing a new tree takes
long in a large fleet.
"""
ROOTS_TRIED: Final = 8
"""Maximum number of nodes considered as owner of a piece, the node that hands it on."""


class Forest:
    """Trees of one broadcast, along which nodes hand pieces on. `members`: nodes by number; the broadcast owns this
    mapping."""

    def __init__(self, paths: BroadcastPaths, members: Mapping[int, Member], piece_bytes: int) -> None:
        self._paths = paths
        self._members = members
        self._piece_bytes = piece_bytes
        self._links: dict[int, list[int]] = {}
        self._copy_s: dict[int, float] = {}
        """Seconds that each node which may hand pieces on needs to send one copy of a piece, by node number."""
        self._s_per_byte: dict[int, tuple[Handing, float]] = {}
        """For each node in `_copy_s`, by number: its work of handing pieces on, and the seconds that it needs to send a
        byte."""
        self._looked_up: dict[int, float] | None = None
        """Seconds until each node has sent its assigned copies, as `roots` computed them. A call of `tree` that follows
        at once reuses them."""
        self._most_copies = inf
        self._last: tuple[Tree, int, int] | None = None
        """Last tree, the nodes it serves (bit mask), and the number of further pieces that may use it."""
        self._links_changed = True
        self._look_at = 0.0

    @property
    def is_deep(self) -> bool:
        return len(self._members) > MOST_IN_A_STAR

    def links_changed(self) -> None:
        """Say that members or links have changed: the next `look` computes the links again."""
        self._links_changed = True
        self._last = None

    def look_again(self) -> None:
        """Let the next `look` compute again which nodes may hand pieces on."""
        self._look_at = 0.0
        self._last = None

    def look(self, owners: int, now: float) -> None:
        """Update which of the nodes in the bit mask `owners` can hand pieces on, and how fast, unless that was done
        less than LOOK_S ago."""
        if not self.is_deep or (now < self._look_at and not self._links_changed):
            return
        self._look_at = now + LOOK_S
        if self._links_changed:
            self._links_changed = False
            self._links = {number: list(bits(member.reach)) for number, member in self._members.items()}
        able = {
            number: member
            for number, member in self._members.items()
            if member.bit & owners and member.reach and member.path.benched_until <= now
        }
        proven = {number: member for number, member in able.items() if member.path.proven}
        if 2 * len(proven) > len(able):  # Unproven nodes first get pieces that they need not hand on.
            able = proven
        known = [member.path.handing.rate for member in able.values() if member.path.handing.rate]
        usual = fmean(known) if known else self._paths.uplink.rate or ASSUMED_UPLINK_BYTES_S
        self._copy_s = {
            number: self._piece_bytes / (member.path.handing.rate or usual) for number, member in able.items()
        }
        self._s_per_byte = {
            number: (able[number].path.handing, copy_s / self._piece_bytes) for number, copy_s in self._copy_s.items()
        }
        copies_s = sum(1 / each_s for each_s in self._copy_s.values())
        hop_s = FAN_OUT * len(able) / copies_s + HOP_S if able else 0.0
        self._most_copies = max(1.0, copies_s * (RELAY_SLACK_S + log(len(self._members), FAN_OUT) * hop_s))

    def has_room(self, num_copies: int) -> bool:
        """Return True if the nodes' uplinks can take more than the `num_copies` copies that are assigned and not sent
        yet.

        The limit is the number of copies that keeps all uplinks busy while one piece passes through a tree.
        """
        return num_copies < self._most_copies

    def roots(self, wanting: int) -> list[Member]:
        """Return the candidates for handing on a piece that the nodes in the bit mask `wanting` lack, sorted by the
        time at which their uplinks are free."""
        if self._last is not None and self._last[1] == wanting:
            return [self._members[self._last[0].root]]
        free_at = self._looked_up = self._free_at()
        able = [one for one in free_at if wanting >> one & 1]
        able.sort(key=lambda one: free_at[one] + FAN_OUT * self._copy_s[one])
        return [self._members[one] for one in able[:ROOTS_TRIED]]

    def tree(self, owner: Member, wanting: int) -> Tree:
        """Return the tree along which the owner's piece gets to the nodes in the bit mask `wanting`."""
        if not self.is_deep:
            return star(owner.number, wanting & owner.reach)
        if self._last is not None and self._last[1] == wanting and self._last[0].root == owner.number:
            tree, left = self._last[0], self._last[2]
        else:
            tree = grow(
                owner.number,
                self._links,
                wanting=set(bits(wanting)),
                free_at=self._looked_up or self._free_at(),
                copy_s=self._copy_s,
            )
            self._looked_up = None
            left = 1 + len(self._members) // NODES_PER_SHARE
        self._last = (tree, wanting, left - 1) if left > 1 else None
        return tree

    def _free_at(self) -> dict[int, float]:
        """Return the seconds until each node has sent all copies assigned to it, by number."""
        members = self._members
        return {
            number: handing.work_bytes * s_per_byte
            for number, (handing, s_per_byte) in self._s_per_byte.items()
            if number in members
        }
