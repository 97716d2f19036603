"""Search for the node that takes rollouts of a group: a node with free capacity, within the terms, without an earlier
failure on them.

While the groups of one owner are offered, free capacity only shrinks. So a failed search is remembered by the group's
length class and the avoided nodes, and later groups of the same kind skip the search.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from math import ceil, inf
from typing import Final

from echo_hub.core.accounting.groups import RolloutGroup, Slot
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes, speed_class
from echo_hub.core.policy.terms import LeaseTerms, typical_s

URGENT: Final = 2.0
"""Work is urgent if its step begins within this many times a typical rollout's time. Urgent work goes to the fastest
nodes first and to unproven ones last, because no time is left to replace a lost rollout."""
PREFILL: Final = 1 / 16
"""Assumed time for the prefill of one prompt token, relative to sampling one token."""
PREFILL_SHARE: Final = 1 / 4
"""Largest share of prefill time, relative to sampling time, that a lease should have: it gets enough completions for
that."""

_Kind = tuple[Hashable, int, int | None]
"""Key of groups for which a search has the same result: avoided nodes, length class and, where rollouts may become
stale, the oldest leased version."""


@lru_cache(maxsize=4_096)
def length_class(num_tokens: float) -> int:
    """Return the length class: lengths in one class differ by less than the factor of a speed class."""
    return speed_class(num_tokens)


class Takers:
    """Finds nodes for groups. Call `begin` whenever nodes may have gained free capacity since the last search."""

    def __init__(self, *, ledger: Ledger, nodes: Nodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._avoided: dict[tuple[tuple[str, ...], int], tuple[str, ...]] = {}
        self._unfillable: dict[tuple[float, ...], set[_Kind]] = {}
        """Kinds of groups for which no node was found, by terms."""
        self.most_avoided = 0
        """Largest number of nodes avoided in one search."""

    def begin(self) -> None:
        self._avoided.clear()
        self._unfillable.clear()
        self.most_avoided = 0

    def avoided(self, slot: Slot, oldest: int) -> tuple[str, ...]:
        """Return the nodes that must not get this index: those on which it failed, while another node takes work."""
        failed = slot.failed_on
        if not failed:
            return ()
        known = self._avoided.get((failed, oldest))
        if known is None:
            candidates = self._nodes.num_candidates(oldest)
            if candidates > self._nodes.num_candidates(oldest, among=failed):
                known = failed
            else:  # It failed on all nodes, so only the latest is avoided now.
                known = failed[-1:] if candidates > 1 else ()
            self._avoided[failed, oldest] = known
        return known

    def any_left(self, group: RolloutGroup, terms: LeaseTerms) -> bool:
        """False if an earlier search with these terms found no node for a group of this kind."""
        unfillable = self._unfillable.get(_key(terms))
        return unfillable is None or _kind(group, terms, group.failures) not in unfillable

    def note_nobody(self, group: RolloutGroup, terms: LeaseTerms) -> None:
        """Remember that no node can take any wanted index of the group."""
        self._unfillable.setdefault(_key(terms), set()).add(_kind(group, terms, group.failures))

    def find(self, group: RolloutGroup, terms: LeaseTerms, avoid: tuple[str, ...] = ()) -> tuple[Node, int] | None:
        """Return the best node for the group, and its maximum number of rollouts; None: no node."""
        unfillable, kind = self._unfillable.setdefault(_key(terms), set()), _kind(group, terms, avoid)
        if kind in unfillable:
            return None
        self.most_avoided = max(self.most_avoided, len(avoid))
        found = self._search(group, terms, avoid)
        if found is None:
            unfillable.add(kind)
        return found

    def _search(self, group: RolloutGroup, terms: LeaseTerms, avoid: tuple[str, ...]) -> tuple[Node, int] | None:
        expected = self._ledger.expected_tokens(group)
        if not expected or (terms.in_s == inf and not terms.not_before_s):
            for node in self._nodes.next_ready(terms.oldest, avoid):
                return node, min(self._nodes.room(node), self._size(group, terms))
            return None
        paces = (terms.not_before_s / expected, min(terms.in_s, terms.suits_s) / expected)
        is_urgent = bool(avoid) or terms.left_s < URGENT * typical_s(self._ledger, self._nodes)
        by_speed = is_urgent or expected > self._ledger.lengths.mean_tokens
        nodes = self._nodes.next_ready(terms.oldest, avoid, paces=paces, by_speed=by_speed, unproven_last=is_urgent)
        # A second failure would cost the whole group, so unproven nodes are avoided.
        only_proven = bool(avoid) and self._nodes.any_proven(beside=avoid)
        for node in nodes:
            if not node.proven and (only_proven or not self._nodes.unproven_may):
                continue
            fitting = node.pace.fits(node.held_tokens, expected, _until_stale(group, node, terms))
            if fitting:
                return node, min(self._nodes.room(node), fitting, self._size(group, terms))
        return None

    def _size(self, group: RolloutGroup, terms: LeaseTerms) -> int:
        """Return the maximum number of rollouts per lease.

        The terms limit the number so that all nodes get a fair share. A long prompt raises it, so that its prefill
        costs little per completion.
        """
        expected = self._ledger.expected_tokens(group)
        worth = ceil(group.prompt_tokens * PREFILL / (PREFILL_SHARE * expected)) if expected else 1
        return max(terms.most, worth)


def _key(terms: LeaseTerms) -> tuple[float, ...]:
    """Return the terms that affect a search result."""
    return terms.oldest, terms.in_s, terms.not_before_s, terms.suits_s, terms.stale_s


def _kind(group: RolloutGroup, terms: LeaseTerms, kept_from: Hashable) -> _Kind:
    return kept_from, length_class(group.expected_tokens), None if terms.stale_s == inf else group.oldest_leased


def _until_stale(group: RolloutGroup, node: Node, terms: LeaseTerms) -> float:
    """Return the seconds within which this node must return a rollout of the group before the group is stale: a group
    is as old as its oldest rollout."""
    if terms.stale_s == inf or node.policy_version is None:
        return terms.in_s
    version = node.policy_version if group.oldest_leased is None else min(node.policy_version, group.oldest_leased)
    return terms.by_version(version)
