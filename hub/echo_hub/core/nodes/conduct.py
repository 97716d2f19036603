"""How nodes behave, and when one rests for it: trust is lost in three ways, and restored when a rollout is scored.

- A *silent* node has let everything that it held pass its deadline. One that has returned good work before is asked
  again at once: its window has shrunk to one rollout. Any other rests each time, first not at all, then for
  `SILENT_RESTS` deadlines; but not while nobody else takes work. It rests for one deadline as soon as a rollout of it
  is late, for that may be wanted no more before its deadline, and then nobody would know that it did not come.
- A *failing* node gave work back, or sent something invalid. Then it rests, for 1 s to 60 s, twice as long each time.
  What fails while it rests already is part of the same failure.
- A *deadly* node sent what ended processes for scoring, in different groups, so that no problem alone is at fault. Then
  it rests likewise, but for `MAX_REST_S` each time as long as nothing of it was ever scored; and one scored rollout
  makes up for no more than `FORGIVEN_BY_ONE` of a death, for whoever sends completions that end processes may send good
  ones as well.

The hub itself is exempt: the learner's own state says when it can sample.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

from echo_hub.core.nodes.node import Node

FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 60.0
FORGIVEN_BY_ONE: Final = 1 / 32
SILENT_RESTS: Final = (0.0, 4.0, 16.0)
"""Rests in deadlines, after the first, the second and every further time. A node that has never returned anything holds
up a group each time that it is asked: with these it costs the run little, and one that only lost its work once is asked
again at once."""


class Conduct:
    """Changes what nodes' records say of their conduct; who has them asks for the rests that are over."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._resting: dict[str, Node] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of (end, node id). A rest that ended early, or was prolonged, leaves its entry behind: at most two
        entries for each node that rests."""
        self._silent: dict[str, Node] = {}
        """Those of the resting that rest for silence alone."""

    @property
    def next_end(self) -> float:
        """When a rest may be over; inf: nobody rests."""
        return self._ends[0][0] if self._ends else inf

    def fail(self, node: Node, now: float) -> None:
        """It gave work back, or sent something invalid: it rests, lest it be asked and fail at once again."""
        if not node.is_hub and (node.rests_until is None or node.node_id in self._silent):
            self._silent.pop(node.node_id, None)
            self._rest(node, now + _rest_s(node.num_failures))
            node.num_failures += 1

    def excuse(self, node: Node) -> None:
        """What it gave back was not its fault: it rests no longer for that."""
        if node.num_failures:
            node.num_failures = 0
            if not node.deaths and node.node_id not in self._silent:
                self._end(node)
                self._forget_ends()

    def kill_scorer(self, node: Node, group_id: int, now: float) -> None:
        """What it sent for this group ended a process for scoring."""
        if node.is_hub:
            return
        recurs = node.deadly_group not in (None, group_id)
        node.deadly_group = group_id
        if recurs and (node.rests_until is None or node.node_id in self._silent):
            self._silent.pop(node.node_id, None)
            node.deaths += 1
            self._rest(node, now + (_rest_s(node.deaths - 1) if node.proven else MAX_REST_S))

    def expire(self, node: Node, now: float) -> None:
        """One of its rollouts has passed its deadline, and counts as overdue."""
        if node.is_hub or node.proven or node.in_flight:
            return
        rest_s = SILENT_RESTS[min(node.num_silences, len(SILENT_RESTS) - 1)] * self._deadline_s
        node.num_silences += 1
        if node.rests_until is None:
            self._silent[node.node_id] = node
        self._rest(node, now + rest_s)

    def keep_waiting(self, node: Node, now: float) -> None:
        """It has never returned anything, and one of its rollouts is late."""
        if not node.is_hub:
            if node.rests_until is None:
                self._silent[node.node_id] = node
            self._rest(node, now + self._deadline_s)

    def trust(self, node: Node) -> None:
        """A rollout of it is scored: what it did before is forgiven."""
        node.deaths = max(0.0, node.deaths - FORGIVEN_BY_ONE)
        if node.num_silences or node.num_failures or node.node_id in self._silent:
            node.num_silences = node.num_failures = 0
            if not node.deaths:
                self._end(node)
                self._forget_ends()

    def wake(self, now: float, *, all_silent: bool) -> list[Node]:
        """Ends the rests that are over and, with `all_silent`, those for silence: whose."""
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
        """Forgets those that nobody rests for, once they are the greater part: that bounds the memory."""
        if len(self._ends) > 2 * len(self._resting):
            self._ends = sorted({(end, node_id) for end, node_id in self._ends if self._is_end(node_id, end)})

    def _is_end(self, node_id: str, end: float) -> bool:
        node = self._resting.get(node_id)
        return node is not None and node.rests_until == end


def _rest_s(num_before: float) -> float:
    rest_s: float = FIRST_REST_S * 2.0 ** min(num_before, 32)
    return min(MAX_REST_S, rest_s)
