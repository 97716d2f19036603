"""Misbehaviour of nodes and the rests that follow. A scored rollout restores trust.

- A *silent* node let all its rollouts pass their deadline. A proven node gets new work at once, but its window shrinks
  to one rollout. An unproven node rests for `SILENT_RESTS` deadlines, first not at all. It is woken early if no other
  node takes work. As soon as an unproven node's rollout is late, the node rests for one deadline. Otherwise a
  replacement could win before the deadline and hide the silence.
- A *failing* node returned work or sent something invalid. It rests for 1 s to 60 s, doubling each time. Failures
  during a rest count as part of the same failure.
- A *deadly* node sent completions that killed scorer processes in different groups, so the fault is not one problem's.
  It rests with the same doubling, or `MAX_REST_S` each time while unproven. One scored rollout forgives only
  `FORGIVEN_BY_ONE` of a death, because an attacker can mix good completions with deadly ones.

The hub's own sampler is exempt: the learner's state already tells when it can sample.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

from echo_hub.core.nodes.node import Node

FIRST_REST_S: Final = 1.0
"""First rest after a failure, in seconds; later rests double."""
MAX_REST_S: Final = 60.0
"""Longest rest after a failure, in seconds."""
FORGIVEN_BY_ONE: Final = 1 / 32
"""Part of a scorer's death that one scored rollout forgives."""
SILENT_RESTS: Final = (0.0, 4.0, 16.0)
"""Length of rests for silence, in deadlines: after the first, the second and every later silence.

An unproven silent node delays a group each time. These rests keep that cost small. A node that lost its work only once
is asked again at once.
"""


class Conduct:
    """Bookkeeping of misbehaviour in the nodes' records. The caller polls `wake` for the rests that are over."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._resting: dict[str, Node] = {}
        self._ends: list[tuple[float, str]] = []
        """Heap of (end, node id). A shortened or prolonged rest leaves a stale entry. The heap has at most two entries
        per resting node."""
        self._silent: dict[str, Node] = {}
        """Resting nodes whose only reason is silence."""

    @property
    def next_end(self) -> float:
        """Return the earliest time at which a rest may be over; inf: no node rests."""
        return self._ends[0][0] if self._ends else inf

    def fail(self, node: Node, now: float) -> None:
        """Rest a node that returned work or sent something invalid, so that it does not fail again at once."""
        if not node.is_hub and (node.rests_until is None or node.node_id in self._silent):
            self._silent.pop(node.node_id, None)
            self._rest(node, now + _rest_s(node.num_failures))
            node.num_failures += 1

    def excuse(self, node: Node) -> None:
        """End the rest for failures that were not the node's fault."""
        if node.num_failures:
            node.num_failures = 0
            if not node.deaths and node.node_id not in self._silent:
                self._end(node)
                self._forget_ends()

    def kill_scorer(self, node: Node, group_id: int, now: float) -> None:
        """Count a scorer process killed by the node's completion for this group."""
        if node.is_hub:
            return
        recurs = node.deadly_group not in (None, group_id)
        node.deadly_group = group_id
        if recurs and (node.rests_until is None or node.node_id in self._silent):
            self._silent.pop(node.node_id, None)
            node.deaths += 1
            self._rest(node, now + (_rest_s(node.deaths - 1) if node.proven else MAX_REST_S))

    def expire(self, node: Node, now: float) -> None:
        """Rest an unproven node whose rollouts are all overdue."""
        if node.is_hub or node.proven or node.in_flight:
            return
        rest_s = SILENT_RESTS[min(node.num_silences, len(SILENT_RESTS) - 1)] * self._deadline_s
        node.num_silences += 1
        if node.rests_until is None:
            self._silent[node.node_id] = node
        self._rest(node, now + rest_s)

    def keep_waiting(self, node: Node, now: float) -> None:
        """Rest an unproven node that has a late rollout."""
        if not node.is_hub:
            if node.rests_until is None:
                self._silent[node.node_id] = node
            self._rest(node, now + self._deadline_s)

    def trust(self, node: Node) -> None:
        """Forgive earlier misbehaviour after a scored rollout."""
        node.deaths = max(0.0, node.deaths - FORGIVEN_BY_ONE)
        if node.num_silences or node.num_failures or node.node_id in self._silent:
            node.num_silences = node.num_failures = 0
            if not node.deaths:
                self._end(node)
                self._forget_ends()

    def wake(self, now: float, *, all_silent: bool) -> list[Node]:
        """End expired rests, and with `all_silent` every rest for silence. Return the woken nodes."""
        awake = list(self._silent.values()) if all_silent else []
        while self._ends and self._ends[0][0] <= now:
            end, node_id = heappop(self._ends)
            if self._is_end(node_id, end) and node_id not in self._silent:
                awake.append(self._resting[node_id])
            elif self._is_end(node_id, end) and not all_silent:
                awake.append(self._silent[node_id])
        for node in awake:
            self._end(node)
        if awake:
            self._forget_ends()
        return awake

    def _end(self, node: Node) -> None:
        node.rests_until = None
        self._resting.pop(node.node_id, None)
        self._silent.pop(node.node_id, None)

    def _rest(self, node: Node, until: float) -> None:
        if node.rests_until is not None and node.rests_until >= until:
            return
        node.rests_until = until
        self._resting[node.node_id] = node
        heappush(self._ends, (until, node.node_id))
        self._forget_ends()

    def _forget_ends(self) -> None:
        """Remove stale heap entries once they are the majority, to bound the memory."""
        if len(self._ends) > 2 * len(self._resting):
            self._ends = sorted({(end, node_id) for end, node_id in self._ends if self._is_end(node_id, end)})

    def _is_end(self, node_id: str, end: float) -> bool:
        node = self._resting.get(node_id)
        return node is not None and node.rests_until == end


def _rest_s(num_before: float) -> float:
    rest_s: float = FIRST_REST_S * 2.0 ** min(num_before, 32)
    return min(MAX_REST_S, rest_s)
