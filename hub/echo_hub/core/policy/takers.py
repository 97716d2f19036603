"""Search for the node that takes a member of a group: ready, suitable for the terms, without an earlier failure on it.

While groups of one owner are offered, capacity only shrinks. So a failed search is remembered by group length and
avoided nodes. Later groups of the same kind skip the search.
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
"""Threshold of urgency, as a multiple of a typical rollout's time until the step begins.

Urgent work goes to the fastest nodes first and to strangers last, because no time is left to replace a lost rollout.
"""
PREFILL: Final = 1 / 16
"""Assumed cost of reading one prompt token, relative to sampling one token."""
PREFILL_SHARE: Final = 1 / 4
"""Upper bound of the prompt's reading cost, relative to the sampling cost of a lease."""

_Kind = tuple[Hashable, int, int | None]
"""Key of groups with the same search result: avoided or failed nodes, length class and, where staleness matters, the
oldest leased version."""


@lru_cache(maxsize=4_096)
def length_class(num_tokens: float) -> int:
    """Return the length class, with the same ratio between classes as for node speeds."""
    return speed_class(num_tokens)


class Takers:
    """Search for nodes. Call `begin` whenever nodes may have gained capacity since the last search."""

    def __init__(self, *, ledger: Ledger, nodes: Nodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._avoided: dict[tuple[tuple[str, ...], int], tuple[str, ...]] = {}
        self._unfillable: dict[tuple[float, ...], set[_Kind]] = {}
        """Failed searches: by terms, the kinds of groups without any node."""
        self.most_avoided = 0
        """Largest number of nodes avoided in one search."""

    def begin(self) -> None:
        self._avoided.clear()
        self._unfillable.clear()
        self.most_avoided = 0

    def avoided(self, slot: Slot, oldest: int) -> tuple[str, ...]:
        """Return the nodes to avoid for this index: nodes on which the index failed, while another candidate exists."""
        failed = slot.failed_on
        if not failed:
            return ()
        known = self._avoided.get((failed, oldest))
        if known is None:
            candidates = self._nodes.num_candidates(oldest)
            if candidates > self._nodes.num_candidates(oldest, among=failed):
                known = failed
            else:  # It failed on every candidate: start another round that avoids only the latest.
                known = failed[-1:] if candidates > 1 else ()
            self._avoided[failed, oldest] = known
        return known

    def any_left(self, group: RolloutGroup, terms: LeaseTerms) -> bool:
        """False if an earlier search with these terms found no node for such a group."""
        unfillable = self._unfillable.get(_key(terms))
        return unfillable is None or _kind(group, terms, group.failures) not in unfillable

    def note_nobody(self, group: RolloutGroup, terms: LeaseTerms) -> None:
        """Remember that no node can take any wanted index of the group."""
        self._unfillable.setdefault(_key(terms), set()).add(_kind(group, terms, group.failures))

    def find(self, group: RolloutGroup, terms: LeaseTerms, avoid: tuple[str, ...] = ()) -> tuple[Node, int] | None:
        """Return the best node for a member of the group, and the maximum number of members; None: no node."""
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
        # Avoid strangers: a second failure would cost the whole group.
        only_proven = bool(avoid) and self._nodes.any_proven(beside=avoid)
        for node in nodes:
            if not node.proven and (only_proven or not self._nodes.unproven_may):
                continue
            fitting = node.pace.fits(node.held_tokens, expected, _until_stale(group, node, terms))
            if fitting:
                return node, min(self._nodes.room(node), fitting, self._size(group, terms))
        return None

    def _size(self, group: RolloutGroup, terms: LeaseTerms) -> int:
        """Return the maximum number of members per lease.

        The terms limit it for a fair share. A long prompt raises it, so that reading the prompt costs little per
        completion.
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
    """Return the seconds until this node's result would be stale: a group is as old as its oldest member."""
    if terms.stale_s == inf or node.policy_version is None:
        return terms.in_s
    version = node.policy_version if group.oldest_leased is None else min(node.policy_version, group.oldest_leased)
    return terms.by_version(version)
