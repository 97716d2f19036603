"""What nodes return: finished rollouts, and leases that they give back without a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from echo_hub.core.accounting.effects import LookUpReceipt
from echo_hub.core.accounting.events import LeaseGivenBack, RolloutArrived
from echo_hub.core.accounting.groups import LeasedRollout, unlike_lease
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.activation.activation import Activation
from echo_hub.core.answering import Answering
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.sizing import oldest_useful_version
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.training import Training
from echo_hub.core.trust.trust import Trust
from echo_shared.wire.messages import DropReason, ReceiptState, rollout_id
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

MAX_RETURNS: Final = 16
"""Number of times that nodes give back one rollout index of a group before the group's owner is told. The owner may
then replace the group, so that an unsolvable problem does not stall the run. Nodes that connect and disconnect return
an index far less often."""


class Returns:
    """Takes returned rollouts and leases into the ledger, and tells the owners of their groups."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ledger: Ledger,
        nodes: Nodes,
        training: Training,
        answering: Answering,
        trust: Trust,
        activation: Activation,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._nodes = nodes
        self._training = training
        self._answering = answering
        self._trust = trust
        self._activation = activation
        self._out = out

    def change(self, settings: CoordinatorSettings) -> None:
        """Take over the settings that an operator has changed."""
        self._settings = settings

    def arrived(self, event: RolloutArrived, now: float) -> None:
        """Take in a finished rollout, unless another node's result has won, the rollout is invalid, or its version is
        too old.
        """
        newest = self._training.published_version if self._settings.interrupts else None
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.node_id != event.node_id:
            if not event.problem:
                drawn = len(event.payload.completion_ids)
                self._activation.came_late(event.node_id, event.rollout_id, drawn, event.payload.sampling_s, now)
            self._out.act(LookUpReceipt(node_id=event.node_id, rollout_id=event.rollout_id))
        elif rollout.state is not ReceiptState.LEASED:
            self._out.receipt(rollout.node_id, rollout.rollout_id, rollout.state)
        elif problem := unlike_lease(event, rollout, owner=self._ledger.groups[rollout.group_id].owner, newest=newest):
            self._ledger.fail(rollout, DropReason.INVALID, problem)
            self._nodes.fail(event.node_id, now)
        elif self._ledger.groups[rollout.group_id].slots[rollout.index].is_won:
            self._ledger.drop([rollout], DropReason.DUPLICATE)
        elif self._settings.interrupts and event.policy_version_start < self._oldest_useful(rollout):
            # The rollout continues tokens from before a restart that are too old for the next step. Only its index is
            # sampled again, not its whole group.
            what = f"its first token was sampled with version {event.policy_version_start}"
            self._ledger.fail(rollout, DropReason.STALE, what)
        elif event.is_unattributed:
            # The hub no longer knows which node sampled the first tokens. If they are forged, this node must not be
            # punished.
            self._ledger.fail(
                rollout, DropReason.RETURNED, "the hub restarted; which node sampled the first tokens is unknown"
            )
        else:
            payload = event.payload
            if event.ends_early:
                payload = replace(payload, sampling_s=max(0.0, now - rollout.leased_at))
            self._ledger.receive(
                rollout,
                payload,
                now,
                oldest_version=event.policy_version_start,
                is_scored_later=self._trust.checks_first(rollout),
            )
            if event.ends_early:
                self._ledger.stop(rollout)
            self._trust.received(rollout)
            if (node := self._nodes.get(event.node_id)) is not None:
                owner = self._answering if event.policy_version_end >= FIRST_TENANT_VERSION else self._training
                owner.drew(event.policy_version_end, node)

    def _oldest_useful(self, rollout: LeasedRollout) -> int:
        """Return the oldest version whose tokens this rollout may contain, so that the next step can still train on it;
        0 for evaluations and tenants' samples."""
        for_learner = self._ledger.groups[rollout.group_id].owner.for_learner
        return oldest_useful_version(self._settings, self._training.next_step) if for_learner else 0

    def given_back(self, event: LeaseGivenBack, now: float) -> None:
        """Drop the rollouts of a lease that its node gives back, and blame the node unless a version is at fault."""
        found = [self._ledger.rollouts.get(rollout_id(event.lease_id, index)) for index in event.indices]
        held = [rollout for rollout in found if rollout and rollout.node_id == event.node_id]
        excused = self._refused(event, held[0]) if held else ()
        for rollout in held:
            if rollout.state is ReceiptState.LEASED:  # The group may have been dropped just before.
                self._return(rollout, event.reason, is_excused=event.node_id in excused)
        for node_id in excused:
            self._nodes.excuse(node_id)
        if event.node_id not in excused:
            self._nodes.fail(event.node_id, now)

    def _refused(self, event: LeaseGivenBack, rollout: LeasedRollout) -> tuple[str, ...]:
        """Return the nodes not blamed for this return of a lease. If the return makes the hub withdraw a version as
        unusable, no node that returned leases because of that version is blamed."""
        version, node = event.unusable_version, self._nodes.get(event.node_id)
        if version is None or node is None or rollout.state is not ReceiptState.LEASED:
            return ()
        if version >= FIRST_TENANT_VERSION:
            if version != rollout.policy_version:
                return ()
            self._nodes.unwilling.cannot_use(event.node_id, version)
            return self._answering.refused(version, node)
        newest = self._training.published_version if self._settings.interrupts else rollout.policy_version
        may_be = rollout.policy_version <= version <= newest
        return self._training.refused(version, node) if may_be else ()

    def _return(self, rollout: LeasedRollout, why: str, *, is_excused: bool) -> None:
        group = self._ledger.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        self._ledger.fail(rollout, DropReason.RETURNED, why)
        slot.num_returns += not is_excused
        if slot.num_returns >= MAX_RETURNS:
            group.owner.returned_too_often(group)
