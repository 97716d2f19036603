"""Who may take a member of a group: the next node that has room, suits the terms, and is not one that it failed on.

While one owner's groups are offered, room only shrinks: where nobody was found for a group, nobody is looked for again
for another one that is as long and to be kept from the same nodes, however many of these wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from math import ceil, inf
from typing import Final

from echo_hub.core.groups import RolloutGroup, Slot
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes, speed_class
from echo_hub.core.terms import Terms, typical_s

URGENT: Final = 2.0
"""What a step takes that is to begin within so many times what a typical rollout takes goes to the fastest nodes, and
to strangers last: nobody could make up for who lets it wait."""
PREFILL: Final = 1 / 16
"""What it costs to read a token of a prompt, over what it costs to draw one."""
PREFILL_SHARE: Final = 1 / 4
"""What reading the prompt may cost, over what drawing a lease's completions costs."""

_Kind = tuple[Hashable, int, int | None]
"""Groups for which the same nodes are looked for: the nodes that they are kept from, or all that they have failed on,
the class of their lengths, and, where that matters, the oldest version that is at work for them."""


@lru_cache(maxsize=4_096)
def length_class(num_tokens: float) -> int:
    """As coarse as the classes of nodes' paces."""
    return speed_class(num_tokens)


class Takers:
    """`begin` is called whenever nodes may have come to have room since the last search."""

    def __init__(self, *, ledger: Ledger, nodes: Nodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._avoided: dict[tuple[tuple[str, ...], int], tuple[str, ...]] = {}
        self._nobody: dict[tuple[float, ...], set[_Kind]] = {}
        """By terms: for whom nobody was found, or for all of whose members nobody was."""
        self.most_avoided = 0
        """The most nodes that were left out in one search."""

    def begin(self) -> None:
        self._avoided.clear()
        self._nobody.clear()
        self.most_avoided = 0

    def avoided(self, slot: Slot, oldest: int) -> tuple[str, ...]:
        """The nodes that the index is kept from: those it failed on, as long as any other node takes work."""
        failed = slot.failed_on
        if not failed:
            return ()
        known = self._avoided.get((failed, oldest))
        if known is None:
            candidates = self._nodes.num_candidates(oldest)
            if candidates > self._nodes.num_candidates(oldest, among=failed):
                known = failed
            else:  # It has failed on all of them: another round, in which the latest is asked last.
                known = failed[-1:] if candidates > 1 else ()
            self._avoided[failed, oldest] = known
        return known

    def any_left(self, group: RolloutGroup, terms: Terms) -> bool:
        """Whether it is worth looking for somebody for what the group wants."""
        nobody = self._nobody.get(_key(terms))
        return nobody is None or _kind(group, terms, group.failures) not in nobody

    def note_nobody(self, group: RolloutGroup, terms: Terms) -> None:
        """Nobody was found for any of what the group wants."""
        self._nobody.setdefault(_key(terms), set()).add(_kind(group, terms, group.failures))

    def find(self, group: RolloutGroup, terms: Terms, avoid: tuple[str, ...] = ()) -> tuple[Node, int] | None:
        """Who may take a member of the group, and how many at most."""
        nobody, kind = self._nobody.setdefault(_key(terms), set()), _kind(group, terms, avoid)
        if kind in nobody:
            return None
        self.most_avoided = max(self.most_avoided, len(avoid))
        found = self._search(group, terms, avoid)
        if found is None:
            nobody.add(kind)
        return found

    def _search(self, group: RolloutGroup, terms: Terms, avoid: tuple[str, ...]) -> tuple[Node, int] | None:
        expected = self._ledger.expected_tokens(group)
        if not expected or (terms.in_s == inf and not terms.not_before_s):
            for node in self._nodes.next_ready(terms.oldest, avoid):
                return node, min(self._nodes.room(node), self._size(group, terms))
            return None
        paces = (terms.not_before_s / expected, min(terms.in_s, terms.suits_s) / expected)
        is_urgent = bool(avoid) or terms.left_s < URGENT * typical_s(self._ledger, self._nodes)
        by_speed = is_urgent or expected > self._ledger.lengths.mean_tokens
        nodes = self._nodes.next_ready(terms.oldest, avoid, paces=paces, by_speed=by_speed, unproven_last=is_urgent)
        only_proven = bool(avoid) and self._nodes.any_proven(beside=avoid)  # A second failure costs its group.
        for node in nodes:
            if not node.proven and (only_proven or not self._nodes.unproven_may):
                continue
            fitting = node.pace.fits(node.held_tokens, expected, _until_stale(group, node, terms))
            if fitting:
                return node, min(self._nodes.room(node), fitting, self._size(group, terms))
        return None

    def _size(self, group: RolloutGroup, terms: Terms) -> int:
        """How many members at most, for the others' sake; at least as many as make it worth reading the prompt."""
        expected = self._ledger.expected_tokens(group)
        worth = ceil(group.prompt_tokens * PREFILL / (PREFILL_SHARE * expected)) if expected else 1
        return max(terms.most, worth)


def _key(terms: Terms) -> tuple[float, ...]:
    """What of the terms says who may be found."""
    return terms.oldest, terms.in_s, terms.not_before_s, terms.suits_s, terms.stale_s


def _kind(group: RolloutGroup, terms: Terms, kept_from: Hashable) -> _Kind:
    return kept_from, length_class(group.expected_tokens), None if terms.stale_s == inf else group.oldest_leased


def _until_stale(group: RolloutGroup, node: Node, terms: Terms) -> float:
    """In how many seconds the node is to have it back: a group is as old as its oldest member."""
    if terms.stale_s == inf or node.policy_version is None:
        return terms.in_s
    version = node.policy_version if group.oldest_leased is None else min(node.policy_version, group.oldest_leased)
    return terms.by_version(version)
