"""Versions in order, and for all from one on: how many candidates have them, and the best place among those.

This is a treap (Aragon and Seidel, Randomized Search Trees, 1989): a search tree by version that is at the same time a
heap by priorities, which keep it shallow. Each entry knows the candidates and the best place of all entries from it
down, so that both questions, like every change, take O(log versions).
"""

from __future__ import annotations

from math import inf
from typing import Final

Place = tuple[float, int, str]
"""The share of its capacity that a node holds, its last lease and its id: the smallest is next."""

_NO_PLACE: Final[Place] = (inf, 0, "")


class _Entry:
    """`count` and `place` are the version's own; `total` and `best` those of all entries from it down."""

    __slots__ = ("best", "count", "left", "parent", "place", "priority", "right", "total", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.count = self.total = 0
        self.place = self.best = _NO_PLACE
        # Strings hash by a secret of the process: nobody can choose versions that make the tree deep.
        self.priority = hash(str(version))
        self.parent: _Entry | None = None
        self.left: _Entry | None = None
        self.right: _Entry | None = None

    def refresh(self) -> bool:
        """Works `total` and `best` out anew: whether they have changed."""
        total, best = self.count, self.place
        for below in (self.left, self.right):
            if below is not None:
                total += below.total
                best = min(best, below.best)
        changed = total != self.total or best != self.best
        self.total, self.best = total, best
        return changed


class VersionTree:
    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._root: _Entry | None = None

    def put(self, version: int, count: int, place: Place | None) -> None:
        """`count` candidates have this version; `place` is the best of theirs."""
        entry = self._entries.get(version) or self._insert(version)
        entry.count, entry.place = count, place or _NO_PLACE
        _refresh_from(entry)

    def discard(self, version: int) -> None:
        """Harmless when it is not there."""
        entry = self._entries.pop(version, None)
        if entry is None:
            return
        while (child := _higher(entry.left, entry.right)) is not None:
            self._raise(child, entry)
        self._replace(entry, None)
        _refresh_from(entry.parent)

    def count(self, oldest: int) -> int:
        """Candidates of this version and of all newer ones."""
        count, entry = 0, self._root
        while entry is not None:
            if entry.version < oldest:
                entry = entry.right
            else:
                count += entry.count + (entry.right.total if entry.right is not None else 0)
                entry = entry.left
        return count

    def first(self, oldest: int) -> Place | None:
        """The best place of this version and of all newer ones."""
        best, entry = _NO_PLACE, self._root
        while entry is not None:
            if entry.version < oldest:
                entry = entry.right
            else:
                best = min(best, entry.place, entry.right.best if entry.right is not None else _NO_PLACE)
                entry = entry.left
        return None if best == _NO_PLACE else best

    def _insert(self, version: int) -> _Entry:
        self._entries[version] = entry = _Entry(version)
        parent, below = None, self._root
        while below is not None:
            parent, below = below, below.left if version < below.version else below.right
        entry.parent = parent
        if parent is None:
            self._root = entry
        elif version < parent.version:
            parent.left = entry
        else:
            parent.right = entry
        while entry.parent is not None and entry.parent.priority < entry.priority:
            self._raise(entry, entry.parent)
        return entry

    def _raise(self, child: _Entry, parent: _Entry) -> None:
        """A rotation: the child takes its parent's place, and the parent becomes its child. The order stays."""
        self._replace(parent, child)
        if parent.left is child:
            moved = parent.left = child.right
            child.right = parent
        else:
            moved = parent.right = child.left
            child.left = parent
        parent.parent = child
        if moved is not None:
            moved.parent = parent
        parent.refresh()
        child.refresh()

    def _replace(self, entry: _Entry, other: _Entry | None) -> None:
        """What is above `entry` has `other` below it instead."""
        above = entry.parent
        if other is not None:
            other.parent = above
        if above is None:
            self._root = other
        elif above.left is entry:
            above.left = other
        else:
            above.right = other


def _higher(left: _Entry | None, right: _Entry | None) -> _Entry | None:
    if left is None or right is None:
        return left or right
    return left if left.priority > right.priority else right


def _refresh_from(entry: _Entry | None) -> None:
    """This entry and those above it, as far as they change."""
    while entry is not None and entry.refresh():
        entry = entry.parent
