"""The search for a node that takes rollouts of a group."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from math import inf

from echo_hub.core.accounting.groups import RolloutGroup, Slot
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.nodes.speed_classes import speed_class
from echo_hub.core.policy.sizing import (
    LeaseTerms,
    lease_size,
)

_Kind = tuple[Hashable, int, int | None]
"""Key of groups for which the search for a node gives equal results: the skipped nodes, the length class and, where
rollouts may become stale, the group's oldest leased version."""


@lru_cache(maxsize=4_096)
def length_class(num_tokens: float) -> int:
    """Return the class of an expected length in tokens. Two lengths in one class differ by less than a factor of 1.5,
    as the seconds per token of two nodes in one speed class do."""
    return speed_class(num_tokens)


class Takers:
    """Finds a node for rollouts of a group: a node with free capacity that meets the terms, and on which the rollouts
    have not failed.

    While the groups of one owner are offered, free capacity only shrinks. So a failed search is remembered by the
    group's length class and the avoided nodes, and later groups of the same kind skip the search. Call `begin` whenever
    nodes may have gained free capacity since the last search.
    """

    def __init__(self, *, ledger: Ledger, nodes: Nodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._avoided: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], int], tuple[str, ...]] = {}
        self._unfillable: dict[tuple[float, ...], set[_Kind]] = {}
        """Kinds of groups (`_Kind`) for which the search found no node, by the terms of the search."""
        self.most_avoided = 0
        """Largest number of nodes that one search since `begin` skipped because the index failed on them."""

    def begin(self) -> None:
        self._avoided.clear()
        self._unfillable.clear()
        self.most_avoided = 0

    def unwilling(self, group: RolloutGroup) -> tuple[str, ...]:
        """Return the nodes that refuse the group's tenant, or cannot use its adapter."""
        return self._nodes.unwilling.of(group.tenant, group.adapter)

    def avoided(self, slot: Slot, oldest: int, unwilling: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the nodes that must not get this index, besides the group's `unwilling` nodes. Nodes that
        still hold the index would sample the same tokens twice. Nodes on which the index failed might fail again;
        if no other node takes such work, only the latest failure counts."""
        failed, held = slot.failed_on, slot.held_by
        if not failed:
            return held
        known = self._avoided.get((failed, held, unwilling, oldest))
        if known is None:
            among = [node_id for node_id in failed if node_id not in unwilling] if unwilling else failed
            candidates = self._nodes.num_candidates(oldest) - self._nodes.num_candidates(oldest, among=unwilling)
            if candidates > self._nodes.num_candidates(oldest, among=among):
                known = failed
            else:  # The index failed on all nodes, so only the latest is avoided now.
                known = failed[-1:] if candidates > 1 else ()
            known = self._avoided[failed, held, unwilling, oldest] = tuple(dict.fromkeys((*known, *held)))
        return known

    def same_node(self, group: RolloutGroup, slot: Slot, terms: LeaseTerms) -> tuple[Node | None, bool]:
        """Return a pair: the node that drew the turn before, if it may take the slot's turn now, else None; and True if
        the turn should wait for this node. The turn should wait if the node has the version that the lease would name,
        but no free capacity."""
        before = slot.turns[-1]
        node = self._nodes.get(before.node_id)
        if node is None or node.candidate is None or node.candidate < terms.oldest:
            return None, False
        unwilling = self.unwilling(group)
        kept_from = (*self.avoided(slot, terms.oldest, unwilling), *unwilling)
        if node.node_id in kept_from or group.owner.lease_version(group, node) != before.policy_version:
            return None, False
        if self._nodes.ready(node.node_id) is None:
            return None, True
        return (node if lease_size(node, group, terms, self._ledger.expected_tokens(group)) else None), False

    def any_left(self, group: RolloutGroup, terms: LeaseTerms) -> bool:
        """Return False if an earlier search with these terms found no node for a group of this kind."""
        unfillable = self._unfillable.get(_key(terms))
        return unfillable is None or _kind(group, terms, (self.unwilling(group), group.kept_from)) not in unfillable

    def note_nobody(self, group: RolloutGroup, terms: LeaseTerms) -> None:
        """Remember, until the next `begin`, that no node can take any wanted index of a group of this kind."""
        kind = _kind(group, terms, (self.unwilling(group), group.kept_from))
        self._unfillable.setdefault(_key(terms), set()).add(kind)

    def find(self, group: RolloutGroup, terms: LeaseTerms, avoid: tuple[str, ...] = ()) -> tuple[Node, int] | None:
        """Return the best node for the group, and its maximum number of rollouts; None: no node. Nodes that the group's
        owner prefers come first, if they have free capacity. Unwilling nodes are never returned."""
        unwilling = self.unwilling(group)
        kept_from = (*avoid, *unwilling) if unwilling else avoid
        for node_id in group.owner.preferred(group):
            if node_id not in kept_from and (preferred := self._nodes.ready(node_id)) is not None:
                size = lease_size(preferred, group, terms, self._ledger.expected_tokens(group))
                return preferred, min(self._nodes.room(preferred), size)
        unfillable, kind = self._unfillable.setdefault(_key(terms), set()), _kind(group, terms, kept_from)
        if kind in unfillable:
            return None
        self.most_avoided = max(self.most_avoided, len(kept_from))
        found = self._search(group, terms, kept_from, has_failed=bool(avoid))
        if found is None:
            unfillable.add(kind)
        return found

    def _search(
        self, group: RolloutGroup, terms: LeaseTerms, avoid: tuple[str, ...], *, has_failed: bool
    ) -> tuple[Node, int] | None:
        """Find a node with free capacity that meets the terms and is not in `avoid`. `has_failed`: True if the index
        failed on some node, or if some node holds it."""
        expected = self._ledger.expected_tokens(group)
        if not expected or (terms.in_s == inf and not terms.not_before_s):
            for node in self._nodes.next_ready(terms.oldest, avoid):
                return node, min(self._nodes.room(node), lease_size(node, group, terms, expected))
            return None
        paces = (terms.not_before_s / expected, min(terms.in_s, terms.suits_s) / expected)
        is_urgent = has_failed or terms.is_urgent
        by_speed = is_urgent or expected > self._ledger.lengths.mean_tokens
        nodes = self._nodes.next_ready(terms.oldest, avoid, paces=paces, by_speed=by_speed, unproven_last=is_urgent)
        # The index has failed once; a second failure would cost the whole group. So skip unproven nodes if any other
        # proven node takes work.
        only_proven = has_failed and self._nodes.any_proven(beside=avoid)
        for node in nodes:
            if not node.proven and (only_proven or not self._nodes.unproven_may):
                continue
            if size := lease_size(node, group, terms, expected):
                return node, min(self._nodes.room(node), size)
        return None


def _key(terms: LeaseTerms) -> tuple[float, ...]:
    return terms.oldest, terms.in_s, terms.not_before_s, terms.suits_s, terms.stale_s


def _kind(group: RolloutGroup, terms: LeaseTerms, kept_from: Hashable) -> _Kind:
    return kept_from, length_class(group.expected_tokens), None if terms.stale_s == inf else group.oldest_leased
