"""Slots of sessions: how many episodes whose environment is a session may be open at the same time.

An open group uses a slot for each of its unfinished episodes, from the moment that its leases are asked for, although
a session opens only after the episode's first turn. If all slots together are fewer than a group's episodes, one group
is open all the same, and its episodes take turns in the slots.

Training and evaluations by nodes share the slots. Evaluations use at most a quarter of the slots, so training continues
during an evaluation, and evaluations during training. Each may open one group however many slots the other uses.
"""

from __future__ import annotations

from typing import Final

from echo_hub.core.accounting.groups import GroupOwner
from echo_hub.core.accounting.ledger import Ledger

EVALUATION_SLOTS: Final = 4
"""Evaluations use at most one in this many slots. Set by hand, like `leasing.EVALUATION_SHARE`."""


class SessionSlots:
    """Counts the slots in use. `total` is the number of slots that there are now; 0: no session may open."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.total = 0

    def used(self, owner: GroupOwner | None = None) -> int:
        """Return the number of slots in use; with an `owner`, by its groups alone."""
        return sum(
            len(group.slots) - group.num_ended
            for group in self._ledger.session_groups.values()
            if owner is None or group.owner is owner
        )

    def fits(self, owner: GroupOwner, size: int) -> bool:
        """Return True if the owner may open a group of `size` episodes now."""
        if not self.total:
            return False
        own = self.used(owner)
        most = self.total if owner.for_learner else self.total // EVALUATION_SLOTS
        return not own or (own + size <= most and self.used() + size <= self.total)
