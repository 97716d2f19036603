"""Takes out of the ledger what is not to be trained on: a forged rollout, or all that a node had a hand in. What is
scored and yet to be judged is held until then.

Whoever went on with what another has drawn loses the work, and is not blamed; nor is anybody whose turn answered a
forged one. What is in a step's batch already stays: it is consumed.
"""

from __future__ import annotations

from echo_hub.core.groups import LeasedRollout
from echo_hub.core.ledger import Ledger
from echo_shared.messages import DropReason, ReceiptState

_NOT_ITS_OWN = "It goes on with what another node has drawn, which is not trusted."


class Forgetting:
    """Drops; what wants a lease again for it is leased to others."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def is_consumed(self, rollout: LeasedRollout) -> bool:
        """A step has it in its batch."""
        group = self._ledger.groups[rollout.group_id]
        return group.owner.for_learner and rollout.group_id not in self._ledger.waiting

    def hold(self, rollout: LeasedRollout) -> None:
        """No step takes its group before `release`; one that has it in its batch keeps it."""
        rollout.is_held = True
        self._ledger.groups[rollout.group_id].num_held += 1
        for ids in (self._ledger.complete, self._ledger.flat):
            ids.discard(rollout.group_id)
        self._ledger.num_queue_changes += 1

    def release(self, rollout: LeasedRollout) -> None:
        """Harmless for any that is not held."""
        if rollout.is_held:
            group = self._ledger.groups[rollout.group_id]
            rollout.is_held = False
            group.num_held -= 1
            if group.complete:
                self._ledger.revoke(group.still_leased, DropReason.EXPIRED)
                if group.group_id in self._ledger.waiting:
                    self._ledger.note_complete(group)

    def forget_rollout(self, rollout: LeasedRollout, reason: DropReason, detail: str, *, is_its_own: bool) -> None:
        """One that has come in and is not consumed, and what its episode has built on it. `is_its_own`: the fault is
        of the node that it was leased to."""
        if is_its_own:
            self._ledger.blame(rollout)
        else:
            reason, detail = DropReason.REVOKED, _NOT_ITS_OWN
        self._let_go(rollout, reason, detail)

    def set_aside(self, rollout: LeasedRollout, detail: str) -> None:
        """One that has come in and is not consumed, of which nobody can say whether it is forged; nobody is blamed."""
        self._let_go(rollout, DropReason.REVOKED, detail)

    def _let_go(self, rollout: LeasedRollout, reason: DropReason, detail: str) -> None:
        slot = self._ledger.groups[rollout.group_id].slots[rollout.index]
        slot.begun = None
        received = slot.received
        later = received[received.index(rollout) + 1 :]
        if rollout is not slot.winner:
            self._ledger.revoke(slot.leased, DropReason.REVOKED)
            self._ledger.drop(reversed(later), DropReason.REVOKED, "A turn before it is not trusted.")
        self._ledger.drop([rollout], reason, detail)

    def forget_node(self, node_id: str, detail: str) -> None:
        """All that the node has drawn any of and that is not consumed, and all that it holds. O(what is not final), as
        it happens once to a node."""
        for group in self._ledger.groups.values():
            for slot in group.slots:
                if slot.begun is not None and node_id in slot.begun.drawers:
                    slot.begun = None
        touched = [rollout for rollout in self._ledger.rollouts.values() if node_id in rollout.drawers]
        leased = [rollout for rollout in touched if rollout.state is ReceiptState.LEASED]
        own = [rollout for rollout in leased if rollout.node_id == node_id]
        for rollout in own:
            self._ledger.blame(rollout)
        self._ledger.revoke(own, DropReason.QUARANTINED)
        # Other indices of these leases are still wanted.
        self._ledger.drop([one for one in leased if one.node_id != node_id], DropReason.REVOKED, _NOT_ITS_OWN)
        for rollout in touched:
            is_there = rollout.rollout_id in self._ledger.rollouts  # It may have built on one that has just gone.
            if is_there and not self.is_consumed(rollout):
                is_its_own = rollout.node_id == node_id
                self.forget_rollout(rollout, DropReason.QUARANTINED, detail, is_its_own=is_its_own)
