"""The nodes that take work, by version and place, and the best place among those of a version or a newer one.

    candidate   version   place: share held, last lease, id
    a           7         (0.50, 12, "a")
    b           7         None: it has no room now
    c           9         (0.75, 11, "c")

`first(8)` is c's place and `first(7)` is a's; `count(7)` is 3.

Each version that a candidate has holds a heap of places, and its best one is in a tree of versions, so everything here
takes O(log candidates). A place that a node has left stays in the heap until it comes to the top, or until such places
are the greater part of all: never are there more than two for each candidate.
"""

from __future__ import annotations

from heapq import heappop, heappush

from echo_hub.core.nodes.version_tree import Place, VersionTree


class Candidates:
    def __init__(self) -> None:
        self._current: dict[str, tuple[int, Place | None]] = {}
        """Each candidate's version, and its place if it has one."""
        self._members: dict[int, int] = {}
        """Candidates of each version that any has."""
        self._heaps: dict[int, list[Place]] = {}
        self._tree = VersionTree()
        self._num_places = 0

    @property
    def num_places(self) -> int:
        """Places that are kept, those that nodes have left among them: at most two for each candidate."""
        return self._num_places

    def version(self, node_id: str) -> int | None:
        """None: it is no candidate."""
        current = self._current.get(node_id)
        return None if current is None else current[0]

    def put(self, node_id: str, version: int, place: Place | None) -> None:
        """The node takes work of this version; `place` None: not now."""
        before, current = self._current.get(node_id), (version, place)
        if current == before:
            return
        self._current[node_id] = current
        if place is not None:
            heappush(self._heaps.setdefault(version, []), place)
            self._num_places += 1
        if before is None or before[0] != version:
            self._members[version] = self._members.get(version, 0) + 1
            if before is not None:
                self._leave(before[0])
        self._settle(version)
        self._forget_left_places()

    def pass_over(self, node_id: str) -> None:
        """The candidate has no place until it is put again."""
        self.put(node_id, self._current[node_id][0], None)

    def discard(self, node_id: str) -> None:
        """The node takes no work; harmless when it is no candidate."""
        current = self._current.pop(node_id, None)
        if current is not None:
            self._leave(current[0])
            self._forget_left_places()

    def count(self, oldest_version: int) -> int:
        """Candidates that have this version or a newer one."""
        return self._tree.count(oldest_version)

    def first(self, oldest_version: int) -> Place | None:
        """The best place of those candidates; None when none of them has one."""
        return self._tree.first(oldest_version)

    def _leave(self, version: int) -> None:
        self._members[version] -= 1
        self._settle(version)

    def _settle(self, version: int) -> None:
        """The heap's top is valid and in the tree; a version that no candidate has is forgotten."""
        heap = self._heaps.get(version, [])
        while heap and self._current.get(heap[0][-1]) != (version, heap[0]):
            heappop(heap)
            self._num_places -= 1
        if not heap:
            self._heaps.pop(version, None)
        if self._members[version]:
            self._tree.put(version, self._members[version], heap[0] if heap else None)
        else:
            del self._members[version]
            self._tree.discard(version)

    def _forget_left_places(self) -> None:
        if self._num_places <= 2 * len(self._current):
            return
        heaps: dict[int, list[Place]] = {}
        for version, place in self._current.values():
            if place is not None:
                heaps.setdefault(version, []).append(place)
        for heap in heaps.values():
            heap.sort()
        self._heaps, self._num_places = heaps, sum(map(len, heaps.values()))
