"""Misbehaviour of nodes. A node that misbehaves gets no work for a while: it *rests*. A scored rollout ends the rest,
except a rest for killed scorer processes.

- A *silent* node let all its rollouts pass their deadline. A proven node (one with a scored rollout) may get new work
  at once, but only one rollout at a time (its window is 1). An unproven node rests for `SILENT_RESTS` times the
  deadline: not at all the first time, longer later. The rest ends early if no other node takes work. An unproven node
  also rests for one deadline as soon as a rollout of it is late: if another node's result wins before the deadline, the
  late rollout is dropped and its silence would go unnoticed.
- A *failing* node returned work or sent something invalid. It rests for 1 s to 60 s, doubling each time. Further
  failures during the rest are ignored: they belong to the same failure.
- A *deadly* node sent completions that killed scorer processes in two or more groups, so no single problem is the
  cause. A proven node rests as after failures, an unproven one for `MAX_REST_S` each time. One scored rollout forgives
  only `FORGIVEN_BY_ONE` of a killed scorer, because an attacker can mix good completions with deadly ones.

The hub's own sampler is exempt: the learner's state already tells when it can sample.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

from echo_hub.core.nodes.node import Node

FIRST_REST_S: Final = 1.0
"""Seconds without work (rest) after a node's first failure. The rest doubles with each further failure."""
MAX_REST_S: Final = 60.0
"""Longest time without work (rest) after a failure, in seconds."""
FORGIVEN_BY_ONE: Final = 1 / 32
"""Part of one killed scorer process that one scored rollout takes off `Node.deaths`, the number of scorer processes
that the node's completions killed."""
SILENT_RESTS: Final = (0.0, 4.0, 16.0)
"""Time without work (rest) of an unproven node that let all its rollouts expire, as a multiple of the lease deadline:
after the first, the second and every later time.

Such a node delays a group each time, so repeated silence costs it long rests. A node that lost its work only once gets
new work at once.
"""


class Conduct:
    """Counts misbehaviour in the nodes' records and sets `rests_until`, the end of a node's rest (pause without work).
    The caller must call `wake` regularly to end the rests that are over."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._resting: dict[str, Node] = {}
        self._ends: list[tuple[float, str]] = []
        """Heap of (end of rest, node id). If a rest is shortened or prolonged, its old entry stays behind and is
        ignored. The heap has at most two entries per resting node."""
        self._silent: dict[str, Node] = {}
        """Nodes that rest only because all their rollouts expired or are late."""

    @property
    def next_end(self) -> float:
        """Return the earliest time at which a node's rest (pause without work) may be over; inf: no node rests."""
        return self._ends[0][0] if self._ends else inf

    def fail(self, node: Node, now: float) -> None:
        if not node.is_hub and (node.rests_until is None or node.node_id in self._silent):
            self._silent.pop(node.node_id, None)
            self._rest(node, now + _rest_s(node.num_failures))
            node.num_failures += 1

    def excuse(self, node: Node) -> None:
        """Forgive failures that were not the node's fault. Its rest (pause without work) ends unless there is another
        reason for it."""
        if node.num_failures:
            node.num_failures = 0
            if not node.deaths and node.node_id not in self._silent:
                self._end(node)
                self._forget_ends()

    def kill_scorer(self, node: Node, group_id: int, now: float) -> None:
        """Count a scorer process that the node's completion for this group killed. Only the second group makes the node
        rest (get no work for a while): one group alone may have a faulty problem."""
        if node.is_hub:
            return
        recurs = node.deadly_group not in (None, group_id)
        node.deadly_group = group_id
        if recurs and (node.rests_until is None or node.node_id in self._silent):
            self._silent.pop(node.node_id, None)
            node.deaths += 1
            self._rest(node, now + (_rest_s(node.deaths - 1) if node.proven else MAX_REST_S))

    def expire(self, node: Node, now: float) -> None:
        """Stop leasing to an unproven node for a while (rest) once all rollouts that it holds are past their
        deadline."""
        if node.is_hub or node.proven or node.in_flight:
            return
        rest_s = SILENT_RESTS[min(node.num_silences, len(SILENT_RESTS) - 1)] * self._deadline_s
        node.num_silences += 1
        if node.rests_until is None:
            self._silent[node.node_id] = node
        self._rest(node, now + rest_s)

    def keep_waiting(self, node: Node, now: float) -> None:
        """Let an unproven node rest (get no work) for the length of one lease deadline, because one of its rollouts is
        late."""
        if not node.is_hub:
            if node.rests_until is None:
                self._silent[node.node_id] = node
            self._rest(node, now + self._deadline_s)

    def trust(self, node: Node) -> None:
        """Forgive the node's silences and failures, and part of the scorers that it killed, because a rollout of it was
        scored. Its rest (pause without work) ends if nothing is left to forgive."""
        node.deaths = max(0.0, node.deaths - FORGIVEN_BY_ONE)
        if node.num_silences or node.num_failures or node.node_id in self._silent:
            node.num_silences = node.num_failures = 0
            if not node.deaths:
                self._end(node)
                self._forget_ends()

    def wake(self, now: float, *, all_silent: bool) -> list[Node]:
        """End the rests (pauses without work) whose time is over. With `all_silent`, also end all rests of nodes whose
        rollouts only expired or are late. Return the nodes that may get work again."""
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
        """Remove outdated heap entries once they are the majority, which bounds the memory."""
        if len(self._ends) > 2 * len(self._resting):
            self._ends = sorted({(end, node_id) for end, node_id in self._ends if self._is_end(node_id, end)})

    def _is_end(self, node_id: str, end: float) -> bool:
        node = self._resting.get(node_id)
        return node is not None and node.rests_until == end


def _rest_s(num_before: float) -> float:
    rest_s: float = FIRST_REST_S * 2.0 ** min(num_before, 32)
    return min(MAX_REST_S, rest_s)
