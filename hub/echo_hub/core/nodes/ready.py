"""The nodes and how much work each still takes: which node is next, in O(log nodes).

A node is *ready* when it has room for a whole group. One whose capacity is smaller than a group is ready when half of
its capacity is free, so that it works on one half while the other travels. Waiting for that much room keeps groups
together: a slot that is filled the moment it is free would make every lease one rollout long. In a multi-turn run most
leases are that long anyway, and a node is ready as soon as it has room for one.

Among the ready ones the node that holds the smallest share of its capacity is next, then the one that waited longest,
then the smallest id. Rollouts past their deadline do not take up capacity, for the node may have lost them; but they
count in that share, so a node that is slow or silent comes after those that answer.

Trust is lost in three ways, and restored when one of the node's rollouts is scored; the hub itself is exempt:
- *silent*: a rollout of it passed its deadline. Then it holds at most one group in flight. Each time that all it holds
  is overdue it also rests, first not at all, then for `SILENT_RESTS` deadlines;
- *failing*: it gave work back, or sent something invalid. Then it rests, for 1 s to 60 s, twice as long each time. What
  fails while it rests already is part of the same failure;
- *deadly*: what it sent ended processes for scoring, in different groups, so that no problem alone is at fault. Then it
  rests likewise; but one scored rollout makes up for no more than `FORGIVEN_BY_ONE` of a death, for whoever sends
  completions that end processes may send good ones as well.
A resting node is no candidate, whatever it reports.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from echo_hub.core.settings import HUB_NODE_ID, CoordinatorSettings

_Place = tuple[float, int, str]

FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 60.0
FORGIVEN_BY_ONE: Final = 1 / 32
SILENT_RESTS: Final = (0.0, 4.0, 16.0)
"""In deadlines, after the first, the second and every further time. A node on trial holds up a group for a deadline:
with these it costs the run little, and a node that only lost its work once is asked again at once."""


@dataclass(slots=True)
class Node:
    """One node that is connected, or that still holds leases. `held` counts rollouts leased and not yet received."""

    node_id: str
    connected: bool = False
    capacity: int = 0
    policy_version: int | None = None
    held: int = 0
    overdue: int = 0
    """Of `held`: past their deadline."""
    silent: bool = False
    num_silences: int = 0
    num_failures: int = 0
    deaths: float = 0.0
    """Processes for scoring that it ended, less what is forgiven."""
    deadly_group: int | None = None
    """The group of the last of them."""
    rests_until: float | None = None
    """None = it does not rest."""
    last_lease_id: int = 0
    bucket: int | None = None
    """Where it counts as a candidate; None = it takes no work."""
    place: _Place | None = None
    """Its valid place in the heap of its bucket; None = not ready."""

    @property
    def free(self) -> int:
        return self.capacity - self.in_flight

    @property
    def in_flight(self) -> int:
        """Rollouts that it holds within their deadline."""
        return self.held - self.overdue


class Fleet:
    """Nodes by the version that they can sample from. Only async mode tells versions apart: in sequential mode a node
    fetches the lease's version before it samples, so all share bucket 0; in co-located mode only the hub is asked."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, Node] = {}
        self._ready: dict[int, list[_Place]] = {}
        self._candidates: dict[int, int] = {}
        self._rests: list[tuple[float, str]] = []
        """A heap of (end, node id); a rest that ended early leaves its entry behind."""

    @property
    def num_connected(self) -> int:
        return sum(node.connected for node in self._nodes.values())

    @property
    def held_by_node(self) -> dict[str, int]:
        """Rollouts leased to each node and not yet received."""
        return {node.node_id: node.held for node in self._nodes.values() if node.held}

    def connect(self, node_id: str) -> None:
        """It takes no work until it reports a capacity."""
        node = self._nodes.setdefault(node_id, Node(node_id))
        node.connected, node.capacity, node.policy_version = True, 0, None
        self._update(node)

    def disconnect(self, node_id: str) -> None:
        if node_id in self._nodes:
            self._nodes[node_id].connected = False
            self._update(self._nodes[node_id])

    def report(self, node_id: str, capacity: int, policy_version: int | None) -> None:
        """Ignored while the node is not connected."""
        node = self._nodes.get(node_id)
        if node is not None and node.connected:
            node.capacity, node.policy_version = capacity, policy_version
            self._update(node)

    def fail(self, node_id: str, now: float) -> None:
        """It gave work back, or sent something invalid: it rests, lest it be asked and fail at once again.

        The hub itself is exempt: the learner's own state says when it can sample.
        """
        node = self._nodes.get(node_id)
        if node is not None and node_id != HUB_NODE_ID and node.rests_until is None:
            self._rest(node, now + min(MAX_REST_S, FIRST_REST_S * 2.0 ** min(node.num_failures, 32)))
            node.num_failures += 1

    def kill_scorer(self, node_id: str, group_id: int, now: float) -> None:
        """What it sent for this group ended a process for scoring."""
        node = self._nodes.get(node_id)
        if node is None or node_id == HUB_NODE_ID:
            return
        recurs = node.deadly_group not in (None, group_id)
        node.deadly_group = group_id
        if recurs and node.rests_until is None:
            node.deaths += 1
            self._rest(node, now + min(MAX_REST_S, FIRST_REST_S * 2.0 ** (min(node.deaths, 32) - 1)))

    def trust(self, node_id: str) -> None:
        """A rollout of it is scored: what it did before is forgiven."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.deaths = max(0.0, node.deaths - FORGIVEN_BY_ONE)
        if node.silent or node.num_failures:
            node.silent, node.num_silences, node.num_failures = False, 0, 0
            if not node.deaths:
                node.rests_until = None
            self._update(node)

    def wake(self, now: float) -> None:
        """Ends the rests that are over."""
        while self._rests and self._rests[0][0] <= now:
            _, node_id = heappop(self._rests)
            node = self._nodes.get(node_id)
            if node is not None and node.rests_until is not None and node.rests_until <= now:
                node.rests_until = None
                self._update(node)

    def take(self, node_id: str, count: int, lease_id: int) -> None:
        """`count` rollouts are leased to it. A node that is not known yet is one from before a restart."""
        node = self._nodes.setdefault(node_id, Node(node_id))
        node.held += count
        node.last_lease_id = lease_id
        self._update(node)

    def expire(self, node_id: str, now: float) -> None:
        """One of its rollouts has passed its deadline."""
        node = self._nodes[node_id]
        node.overdue += 1
        if node_id != HUB_NODE_ID:
            node.silent = True
            if node.in_flight == 0:
                rest_s = SILENT_RESTS[min(node.num_silences, len(SILENT_RESTS) - 1)] * self._settings.deadline_s
                node.num_silences += 1
                self._rest(node, now + rest_s)
        self._update(node)

    def release(self, node_id: str, *, overdue: bool) -> None:
        """One of its rollouts has come in, or is wanted no more."""
        node = self._nodes[node_id]
        node.held -= 1
        node.overdue -= overdue
        self._update(node)

    def num_candidates(self, oldest_version: int, among: Collection[str] | None = None) -> int:
        """Nodes (of `among`, if given) that take work and have a version from `oldest_version` on, full ones too."""
        if among is None:
            return sum(count for bucket, count in self._candidates.items() if bucket >= oldest_version)
        buckets = [self._nodes[node_id].bucket for node_id in among if node_id in self._nodes]
        return sum(bucket is not None and bucket >= oldest_version for bucket in buckets)

    def next_ready(self, oldest_version: int, avoid: Collection[str]) -> Node | None:
        """The node to lease to; it stays where it is until it takes something."""
        passed_over: list[tuple[int, _Place]] = []
        chosen = None
        while chosen is None:
            tops = [(place, bucket) for bucket in self._fresh(oldest_version) if (place := self._top(bucket))]
            if not tops:
                break
            place, bucket = min(tops)
            if place[-1] in avoid:
                passed_over.append((bucket, heappop(self._ready[bucket])))
            else:
                chosen = self._nodes[place[-1]]
        for bucket, place in passed_over:
            heappush(self._ready.setdefault(bucket, []), place)
        return chosen

    def _fresh(self, oldest_version: int) -> list[int]:
        return [bucket for bucket in self._ready if bucket >= oldest_version]

    def _top(self, bucket: int) -> _Place | None:
        """The bucket's first valid place; places that nodes have left meanwhile are thrown away."""
        heap = self._ready[bucket]
        while heap:
            node = self._nodes.get(heap[0][-1])
            if node is not None and node.bucket == bucket and node.place == heap[0]:
                return heap[0]
            heappop(heap)
        del self._ready[bucket]
        return None

    def _update(self, node: Node) -> None:
        bucket = self._bucket(node)
        if bucket != node.bucket:
            self._count(node.bucket, -1)
            self._count(bucket, 1)
        size = 1 if self._settings.multi_turn else self._settings.group_size
        ready = bucket is not None and node.free >= (size if node.capacity >= size else (node.capacity + 1) // 2)
        ready = ready and not (node.silent and node.in_flight)
        place = (node.held / node.capacity, node.last_lease_id, node.node_id) if ready else None
        moved = place != node.place or bucket != node.bucket
        node.bucket, node.place = bucket, place
        if moved and bucket is not None and place is not None:
            self._push(bucket, place)
        if not node.connected and node.held == 0 and node.rests_until is None:
            del self._nodes[node.node_id]

    def _rest(self, node: Node, until: float) -> None:
        node.rests_until = max(until, node.rests_until or 0.0)
        heappush(self._rests, (node.rests_until, node.node_id))
        self._update(node)

    def _push(self, bucket: int, place: _Place) -> None:
        heap = self._ready.setdefault(bucket, [])
        heappush(heap, place)
        if len(heap) > 64 + 4 * self._candidates[bucket]:  # Mostly places that nodes have left: bounds the memory.
            valid = {node.place for node in self._nodes.values() if node.bucket == bucket and node.place is not None}
            self._ready[bucket] = sorted(valid)

    def _bucket(self, node: Node) -> int | None:
        if not node.connected or node.capacity < 1 or node.policy_version is None or node.rests_until is not None:
            return None
        if self._settings.mode == "async":
            return node.policy_version
        return 0 if self._settings.mode == "sequential" or node.node_id == HUB_NODE_ID else None

    def _count(self, bucket: int | None, change: int) -> None:
        if bucket is not None:
            count = self._candidates.get(bucket, 0) + change
            if count:
                self._candidates[bucket] = count
            else:
                del self._candidates[bucket]
