"""Restoration of the ledger's state after a restart, without any record, receipt or message.

Restore groups first (`Ledger.add_group`), then their rollouts in turn order, then scorer failures, then planned batches
(`Ledger.take_from_queues`).
"""

from __future__ import annotations

from echo_hub.core.accounting.groups import LeasedRollout
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.snapshot import UnfinishedRollout
from echo_shared.wire.messages import Checked, ReceiptState


def restore_rollout(ledger: Ledger, row: UnfinishedRollout, now: float) -> LeasedRollout:
    """Restore a rollout of a restored group. Restore earlier turns of an episode first."""
    rollout = _restored(row, now)
    group = ledger.groups[row.group_id]
    slot = group.slots[row.index]
    group.num_tokens += row.num_tokens
    if row.state is ReceiptState.LEASED:
        ledger.hold(rollout, now)
    else:
        ledger.rollouts[row.rollout_id] = rollout
        ledger.note_version(group, rollout.oldest_version)
        group.note_age(rollout)
        if row.state is ReceiptState.SCORED and row.reward is None:
            slot.turns = (*slot.turns, rollout)
            group.is_plain = False
        else:
            slot.winner = rollout
            group.num_ended += row.state is ReceiptState.SCORED
            ledger.note_complete(group)
    ledger.wants.note(group, row.index)
    return rollout


def restore_failure(ledger: Ledger, group_id: int, index: int, turn: int) -> None:
    """Restore a failure of the scorer on this turn, because it changes the seed of the next attempt."""
    group = ledger.groups[group_id]
    group.is_plain = False
    group.slots[index].failed_draws += (turn,)


def _restored(row: UnfinishedRollout, now: float) -> LeasedRollout:
    return LeasedRollout(
        row.rollout_id,
        row.lease_id,
        row.node_id,
        row.group_id,
        row.index,
        row.policy_version,
        row.turn,
        row.state,
        row.num_tokens,
        row.reward,
        row.deadline,
        turn_reward=row.turn_reward,
        leased_at=now,
        oldest_version=row.policy_version if row.oldest_version is None else row.oldest_version,
        drawn_by=row.drawn_by,
        is_checked=row.checked is not Checked.NO,
    )
