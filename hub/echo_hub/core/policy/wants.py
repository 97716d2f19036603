"""Indices that want a lease.

A group's `unleased` holds its indices that want one. An owner's `wanting` holds exactly its groups with such an index.
A group with `asked_for` False has no index that wants a lease.
"""

from __future__ import annotations

from echo_hub.core.accounting.groups import RolloutGroup


class Wants:
    """Maintains `unleased` of each group and `wanting` of each owner. The caller must report every changed slot."""

    def __init__(self) -> None:
        self.num_changes = 0
        """Counter that grows whenever an index may start to want a lease."""

    def note(self, group: RolloutGroup, index: int) -> None:
        """Update an index after any change of its slot."""
        group.note_wants()
        if group.asked_for and group.slots[index].wants_lease:
            group.unleased.add(index)
            group.owner.wanting.add(group.group_id)
            self.num_changes += 1
        else:
            self.settle(group, index)

    def note_all(self, group: RolloutGroup) -> None:
        """Update all indices of a newly requested group; until now it wanted no lease."""
        group.note_wants()
        group.unleased.update([index for index, slot in enumerate(group.slots) if slot.wants_lease])
        if group.unleased:
            group.owner.wanting.add(group.group_id)
            self.num_changes += 1

    def settle(self, group: RolloutGroup, index: int) -> None:
        """Note that the index wants no lease."""
        group.note_wants()
        if index in group.unleased:
            group.unleased.discard(index)
            if not group.unleased:
                group.owner.wanting.discard(group.group_id)
