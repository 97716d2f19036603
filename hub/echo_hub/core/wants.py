"""Which indices of which groups want a lease.

A group's `unleased` holds its indices that want one, and its owner's `wanting` exactly the groups that have such an
index. Nothing of a group that its owner has not asked for is wanted.
"""

from __future__ import annotations

from echo_hub.core.groups import RolloutGroup


class Wants:
    """Told of every index whose slot has changed."""

    def __init__(self) -> None:
        self.num_changes = 0
        """Grows whenever an index may have come to want a lease."""

    def note(self, group: RolloutGroup, index: int) -> None:
        """The index may have come to want a lease, or want none any more, or it has failed somewhere."""
        group.note_wants()
        if group.asked_for and group.slots[index].wants_lease:
            group.unleased.add(index)
            group.owner.wanting.add(group.group_id)
            self.num_changes += 1
        else:
            self.settle(group, index)

    def note_all(self, group: RolloutGroup) -> None:
        """As `note` of each index of a group that is asked for and of which none wanted a lease before."""
        group.note_wants()
        group.unleased.update([index for index, slot in enumerate(group.slots) if slot.wants_lease])
        if group.unleased:
            group.owner.wanting.add(group.group_id)
            self.num_changes += 1

    def settle(self, group: RolloutGroup, index: int) -> None:
        """The index does not want a lease, or not any more."""
        group.note_wants()
        if index in group.unleased:
            group.unleased.discard(index)
            if not group.unleased:
                group.owner.wanting.discard(group.group_id)
