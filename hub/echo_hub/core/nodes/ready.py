"""The nodes and how much work each still takes: which node is next, in O(log nodes).

A node is *ready* when it has room for a whole group. One whose capacity is smaller than a group is ready when half of
its capacity is free, so that it works on one half while the other travels. Waiting for that much room keeps groups
together: a slot that is filled the moment it is free would make every lease one rollout long. In a multi-turn run most
leases are that long anyway, and a node is ready as soon as it has room for one.

Among the ready ones the node that holds the smallest share of its capacity is next, then the one that waited longest,
then the smallest id. Rollouts past their deadline do not take up capacity, for the node may have lost them; but they
count in that share, so a node that is slow or silent comes after those that answer.

A resting node is no candidate, whatever it reports, and a silent one is not ready while it has work: see `conduct`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

from echo_hub.core.nodes.candidates import Candidates
from echo_hub.core.nodes.conduct import Conduct
from echo_hub.core.nodes.node import Node, NodeSettings
from echo_hub.core.nodes.version_tree import Place


class Nodes:
    """All nodes that are connected, that hold leases or that rest. Only where `samplers` is "by_version" are versions
    told apart; else all candidates count as of version 0."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, Node] = {}
        self._candidates = Candidates()
        self._conduct = Conduct(deadline_s=settings.deadline_s)

    @property
    def num_known(self) -> int:
        return len(self._nodes)

    @property
    def num_places(self) -> int:
        """Entries in all queues here: at most two for each node that is known, whatever came before."""
        return self._candidates.num_places + self._conduct.num_ends

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
        """What the node says that it can do; ignored while it is not connected."""
        node = self._nodes.get(node_id)
        if node is not None and node.connected:
            node.capacity, node.policy_version = capacity, policy_version
            self._update(node)

    def fail(self, node_id: str, now: float) -> None:
        """The node gave work back, or sent something invalid."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.fail(node, now)
            self._update(node)

    def kill_scorer(self, node_id: str, group_id: int, now: float) -> None:
        """What the node sent for this group ended a process for scoring."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.kill_scorer(node, group_id, now)
            self._update(node)

    def trust(self, node_id: str) -> None:
        """A rollout of the node is scored."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.trust(node)
            self._update(node)

    def wake(self, now: float) -> None:
        """Ends the rests that are over."""
        for node in self._conduct.wake(now):
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
        self._conduct.expire(node, now)
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
            return self._candidates.count(oldest_version)
        versions = [self._candidates.version(node_id) for node_id in among]
        return sum(version is not None and version >= oldest_version for version in versions)

    def next_ready(self, oldest_version: int, avoid: Collection[str]) -> Node | None:
        """The node to lease to; it stays where it is until it takes something."""
        passed_over: list[Node] = []
        while (place := self._candidates.first(oldest_version)) is not None and place[-1] in avoid:
            node = self._nodes[place[-1]]
            passed_over.append(node)
            self._candidates.pass_over(node.node_id)
        for node in passed_over:
            self._update(node)
        return None if place is None else self._nodes[place[-1]]

    def _update(self, node: Node) -> None:
        version = self._version(node)
        if version is None:
            self._candidates.discard(node.node_id)
        else:
            self._candidates.put(node.node_id, version, self._place(node))
        if not node.connected and node.held == 0 and node.rests_until is None:
            del self._nodes[node.node_id]

    def _place(self, node: Node) -> Place | None:
        """Its place among those of its version; None: it is not ready."""
        size = self._settings.lease_size
        wanted = size if node.capacity >= size else (node.capacity + 1) // 2
        if node.free < wanted or (node.silent and node.in_flight):
            return None
        return (node.held / node.capacity, node.last_lease_id, node.node_id)

    def _version(self, node: Node) -> int | None:
        """What it counts as a candidate of; None: it takes no work."""
        if not node.connected or node.capacity < 1 or node.policy_version is None or node.rests_until is not None:
            return None
        match self._settings.samplers:
            case "by_version":
                return node.policy_version
            case "any":
                return 0
            case "hub":
                return 0 if node.is_hub else None
            case unknown:
                assert_never(unknown)
