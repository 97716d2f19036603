"""Remove untrusted work from the ledger: a forged rollout, or all rollouts of a node. Hold scored rollouts until their
check has ended.

A node that continued the tokens of a dishonest node loses that work but is not blamed. The same holds for later turns
of an episode with a forged turn. Rollouts in a step's batch are consumed and stay.
"""

from __future__ import annotations

from echo_hub.core.accounting.groups import LeasedRollout
from echo_hub.core.accounting.ledger import Ledger
from echo_shared.wire.messages import DropReason, ReceiptState

_NOT_ITS_OWN = "It continues the tokens of another node, which is not trusted."


class Forgetting:
    """Drops rollouts from the ledger, and keeps rollouts out of batches while they are checked. Dropped work is leased
    again."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def is_consumed(self, rollout: LeasedRollout) -> bool:
        group = self._ledger.groups[rollout.group_id]
        return group.owner.for_learner and rollout.group_id not in self._ledger.waiting

    def hold(self, rollout: LeasedRollout) -> None:
        """Keep the rollout's group out of batches until `release`. A group that is already in a batch stays there."""
        rollout.is_held = True
        self._ledger.groups[rollout.group_id].num_held += 1
        for ids in (self._ledger.complete, self._ledger.flat):
            ids.discard(rollout.group_id)
        self._ledger.num_queue_changes += 1

    def release(self, rollout: LeasedRollout) -> None:
        """Stop keeping the rollout's group out of batches (`hold`). The group may enter batches again, unless another
        of its rollouts is held."""
        if rollout.is_held:
            group = self._ledger.groups[rollout.group_id]
            rollout.is_held = False
            group.num_held -= 1
            if group.complete:
                self._ledger.revoke(group.still_leased, DropReason.EXPIRED)
                if group.group_id in self._ledger.waiting:
                    self._ledger.note_complete(group)

    def forget_rollout(self, rollout: LeasedRollout, reason: DropReason, detail: str, *, is_its_own: bool) -> None:
        """Drop a received rollout that is in no batch, and all later turns of its episode. `is_its_own`: the node that
        the rollout was leased to is at fault, so other nodes are tried first."""
        if is_its_own:
            self._ledger.blame(rollout)
        else:
            reason, detail = DropReason.REVOKED, _NOT_ITS_OWN
        self._let_go(rollout, reason, detail)

    def set_aside(self, rollout: LeasedRollout, detail: str) -> None:
        """Drop a received rollout outside of batches whose check stays undecided. No node is blamed."""
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
        """Drop all rollouts with tokens of this node that are in no batch, and revoke its leases. Takes O(unfinished
        rollouts), once per quarantine."""
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
        # Other indices of these leases stay wanted, so no lease is revoked.
        self._ledger.drop([one for one in leased if one.node_id != node_id], DropReason.REVOKED, _NOT_ITS_OWN)
        for rollout in touched:
            is_there = rollout.rollout_id in self._ledger.rollouts  # A drop above may have removed the rollout.
            if is_there and not self.is_consumed(rollout):
                is_its_own = rollout.node_id == node_id
                self.forget_rollout(rollout, DropReason.QUARANTINED, detail, is_its_own=is_its_own)
