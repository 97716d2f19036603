"""How nodes behave, and when one rests for it: trust is lost in three ways, and restored when a rollout is scored.

- A *silent* node has let a rollout pass its deadline. Then it holds at most one group in flight. Each time that all it
  holds is overdue it also rests, first not at all, then for `SILENT_RESTS` deadlines.
- A *failing* node gave work back, or sent something invalid. Then it rests, for 1 s to 60 s, twice as long each time.
  What fails while it rests already is part of the same failure.
- A *deadly* node sent what ended processes for scoring, in different groups, so that no problem alone is at fault. Then
  it rests likewise; but one scored rollout makes up for no more than `FORGIVEN_BY_ONE` of a death, for whoever sends
  completions that end processes may send good ones as well.

The hub itself is exempt: the learner's own state says when it can sample.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from echo_hub.core.nodes.node import Node

FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 60.0
FORGIVEN_BY_ONE: Final = 1 / 32
SILENT_RESTS: Final = (0.0, 4.0, 16.0)
"""Rests in deadlines, after the first, the second and every further time. A node on trial holds up a group for a
deadline: with these it costs the run little, and a node that only lost its work once is asked again at once."""


class Conduct:
    """Changes what nodes' records say of their conduct; who has them asks for the rests that are over."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._resting: dict[str, Node] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of (end, node id); a rest that ended early or was prolonged leaves its entry behind."""

    @property
    def num_ends(self) -> int:
        """Ends of rests that are remembered: at most two for each node that rests."""
        return len(self._ends)

    def fail(self, node: Node, now: float) -> None:
        """It gave work back, or sent something invalid: it rests, lest it be asked and fail at once again."""
        if not node.is_hub and node.rests_until is None:
            self._rest(node, now + _rest_s(node.num_failures))
            node.num_failures += 1

    def kill_scorer(self, node: Node, group_id: int, now: float) -> None:
        """What it sent for this group ended a process for scoring."""
        if node.is_hub:
            return
        recurs = node.deadly_group not in (None, group_id)
        node.deadly_group = group_id
        if recurs and node.rests_until is None:
            node.deaths += 1
            self._rest(node, now + _rest_s(node.deaths - 1))

    def expire(self, node: Node, now: float) -> None:
        """One of its rollouts has passed its deadline, and counts as overdue."""
        if node.is_hub:
            return
        node.silent = True
        if node.in_flight == 0:
            rest_s = SILENT_RESTS[min(node.num_silences, len(SILENT_RESTS) - 1)] * self._deadline_s
            node.num_silences += 1
            self._rest(node, now + rest_s)

    def trust(self, node: Node) -> None:
        """A rollout of it is scored: what it did before is forgiven."""
        node.deaths = max(0.0, node.deaths - FORGIVEN_BY_ONE)
        if node.silent or node.num_failures:
            node.silent, node.num_silences, node.num_failures = False, 0, 0
            if not node.deaths:
                node.rests_until = None
                self._resting.pop(node.node_id, None)
                self._forget_ends()

    def wake(self, now: float) -> list[Node]:
        """Ends the rests that are over: whose."""
        awake: list[Node] = []
        while self._ends and self._ends[0][0] <= now:
            end, node_id = heappop(self._ends)
            if self._is_end(node_id, end):
                node = self._resting.pop(node_id)
                node.rests_until = None
                awake.append(node)
        self._forget_ends()
        return awake

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
