"""The nodes and how much work each still takes: which node is next, in O(log nodes).

A node is *ready* when it has room for a whole group. One whose capacity is smaller than a group is ready when half of
its capacity is free, so that it works on one half while the other travels. Waiting for that much room keeps groups
together: a slot that is filled the moment it is free would make every lease one rollout long.

Among the ready ones the node that holds the smallest share of its capacity is next, then the one that waited longest,
then the smallest id. Rollouts past their deadline do not take up capacity, for the node may have lost them; but they
count in that share, so a node that is slow or silent comes after those that answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import heappop, heappush

from echo_hub.core.settings import HUB_NODE_ID, CoordinatorSettings

_Place = tuple[float, int, str]


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
    last_lease_id: int = 0
    bucket: int | None = None
    """Where it counts as a candidate; None = it takes no work."""
    place: _Place | None = None
    """Its valid place in the heap of its bucket; None = not ready."""

    @property
    def free(self) -> int:
        return self.capacity - (self.held - self.overdue)


class Fleet:
    """Nodes by the version that they can sample from. Only async mode tells versions apart: in sequential mode a node
    fetches the lease's version before it samples, so all share bucket 0; in co-located mode only the hub is asked."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, Node] = {}
        self._ready: dict[int, list[_Place]] = {}
        self._candidates: dict[int, int] = {}

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

    def rest(self, node_id: str) -> None:
        """No more work for this node until its next report, so that a node that fails at once is not asked at once.

        The hub itself is exempt: the learner's own state says when it can sample.
        """
        if node_id in self._nodes and node_id != HUB_NODE_ID:
            self._nodes[node_id].capacity = 0
            self._update(self._nodes[node_id])

    def take(self, node_id: str, count: int, lease_id: int) -> None:
        """`count` rollouts are leased to it. A node that is not known yet is one from before a restart."""
        node = self._nodes.setdefault(node_id, Node(node_id))
        node.held += count
        node.last_lease_id = lease_id
        self._update(node)

    def expire(self, node_id: str, count: int) -> None:
        """`count` of its rollouts have passed their deadline."""
        self._nodes[node_id].overdue += count
        self._update(self._nodes[node_id])

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
        size = self._settings.group_size
        ready = bucket is not None and node.free >= (size if node.capacity >= size else (node.capacity + 1) // 2)
        place = (node.held / node.capacity, node.last_lease_id, node.node_id) if ready else None
        moved = place != node.place or bucket != node.bucket
        node.bucket, node.place = bucket, place
        if moved and bucket is not None and place is not None:
            self._push(bucket, place)
        if not node.connected and node.held == 0:
            del self._nodes[node.node_id]

    def _push(self, bucket: int, place: _Place) -> None:
        heap = self._ready.setdefault(bucket, [])
        heappush(heap, place)
        if len(heap) > 64 + 4 * self._candidates[bucket]:  # Mostly places that nodes have left: bounds the memory.
            valid = {node.place for node in self._nodes.values() if node.bucket == bucket and node.place is not None}
            self._ready[bucket] = sorted(valid)

    def _bucket(self, node: Node) -> int | None:
        if not node.connected or node.capacity < 1 or node.policy_version is None:
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
