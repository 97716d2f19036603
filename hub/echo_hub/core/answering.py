"""Samples that tenants ask for: completions of their own prompts, drawn by nodes. Their groups differ from training
groups in four ways:

- A lease names the version that the request names: the base model, a version of the run, or a tenant's adapter.
- Each group has sampling parameters of its own.
- There is no reward. A rollout that passed its checks becomes `answered`, is delivered, and has no further effect here.
- The groups are not in the learner's queues, and they cannot become stale.

The store keeps each group with its prompt until its requests are settled. After a restart, the hub leases
unfinished samples again, with equal seeds. No failure of a node ends a request: only its tenant can cancel it.

A tenant's adapter should reach few nodes. So each group goes first to nodes that had leases of the same version
(`preferred`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from echo_hub.core.accounting.effects import AnswerOpened, AnswersCancelled, DeliverAnswer
from echo_hub.core.accounting.groups import LeasedRollout, RolloutGroup, Slot, SortedIds
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.answer_groups import AnswerGroup, is_answer
from echo_hub.core.nodes.node import Node
from echo_hub.core.policy.measured import CompletionLengths
from echo_hub.core.policy.usability import Usability
from echo_hub.core.tenant_names import TenantNames
from echo_shared.wire.messages import DropReason
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

HOLDERS: Final = 64
"""Number of nodes that are remembered for each version of a tenant: the nodes that had leases of this version last. Set
by hand.
"""
VERSIONS: Final = 1_024
"""Number of versions whose nodes are remembered: those used last. Set by hand."""


class Answering:
    """Owner of the groups of tenants' samples.

    `_open`: groups with unfinished samples. `_holders`: the nodes that had leases of each tenant's version.
    """

    for_learner = False
    keeps_payloads = True
    may_move_on = False
    """Nodes may not switch to another version within a completion: a request names one version."""

    def __init__(
        self,
        snapshot: CoordinatorSnapshot,
        *,
        ledger: Ledger,
        out: Outbox,
        names: TenantNames = TenantNames(),  # noqa: B008  # It is frozen.
    ) -> None:
        self._names = names
        self._ledger = ledger
        self._out = out
        self._ended = snapshot.answered
        self.wanting = SortedIds()
        self.lengths = CompletionLengths()
        self._open: dict[int, AnswerGroup] = {}
        self._holders: OrderedDict[int, OrderedDict[str, None]] = OrderedDict()
        self._usability = Usability(most_versions=VERSIONS)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def restore(self, groups: Iterable[AnswerGroup]) -> None:
        """Open the unfinished groups that the store has from before the hub's restart. The caller then restores their
        rollouts.
        """
        for group in groups:
            self._begin(group)

    def begin(self, group: AnswerGroup) -> None:
        """Open a new group: its samples want leases from now on."""
        assert is_answer(group.group_id), "an id of another kind of group"
        if group.group_id not in self._ledger.groups:
            self._out.record(AnswerOpened(group=group))
            self._begin(group)

    def cancel(self, group_id: int, request_id: str) -> None:
        """End the unfinished samples of one request. Revoke each lease that has no sample of another open request."""
        asked, group = self._open.get(group_id), self._ledger.groups.get(group_id)
        if asked is None or group is None:
            return
        for member in asked.members:
            if member.request_id == request_id:
                self._out.record(AnswersCancelled(group_id=group_id, request_id=request_id))
                self._ledger.give_up(group, [index for index in member.indices if not group.slots[index].is_over])
        self._forget_if_over(group_id)

    def lease_version(self, group: RolloutGroup, node: Node) -> int:
        """Return the version that the request names. A node that lacks this version fetches it."""
        version = self._open[group.group_id].policy_version
        if version >= FIRST_TENANT_VERSION:
            holders = self._holders.setdefault(version, OrderedDict())
            holders[node.node_id] = None
            holders.move_to_end(node.node_id)
            if len(holders) > HOLDERS:
                holders.popitem(last=False)
            self._holders.move_to_end(version)
            if len(self._holders) > VERSIONS:
                self._holders.popitem(last=False)
        return version

    def preferred(self, group: RolloutGroup) -> tuple[str, ...]:
        """Return the nodes that had leases of the group's version, the latest first. Empty for the base model and
        the run's versions: all nodes have these."""
        return tuple(reversed(self._holders.get(self._open[group.group_id].policy_version, ())))

    def end_episode(self, rollout: LeasedRollout, reward: float) -> None:
        """Deliver a rollout that passed the checks. `reward` has no meaning here."""
        payload, rollout.payload = rollout.payload, None
        self._ledger.answer(rollout)
        self._out.act(
            DeliverAnswer(
                group_id=rollout.group_id,
                index=rollout.index,
                rollout_id=rollout.rollout_id,
                node_id=rollout.node_id,
                payload=payload,
            )
        )
        self._forget_if_over(rollout.group_id)

    def refused(self, policy_version: int, node: Node) -> tuple[str, ...]:
        """Note that a node's engine cannot use a tenant's adapter. Return the nodes that get no blame for returning
        leases.

        Tenants make their adapters, so the node is excused, unless another node has drawn with the adapter.
        """
        excused = self._usability.refused(policy_version, node)
        return () if self._usability.has_drawn(policy_version) else (*excused, node.node_id)

    def drew(self, policy_version: int, node: Node) -> None:
        """Note that a node has drawn with a tenant's adapter."""
        self._usability.drew(policy_version, node)

    def is_unusable(self, policy_version: int) -> bool:
        """Return True if nodes of several origins cannot use a tenant's adapter, and no node has drawn with it."""
        return self._usability.is_withdrawn(policy_version)

    def scorer_failed(self, rollout: LeasedRollout, detail: str) -> None:
        """Lease the index again, with the same seed. Tenants' rollouts have no scorer, so this means that their checks
        could not run."""
        self._ledger.fail(rollout, DropReason.RETURNED, detail)

    def returned_too_often(self, group: RolloutGroup) -> None:
        """Do nothing: the request waits for a suitable node, or for its tenant to cancel."""

    def end_run(self) -> None:
        """Do nothing: tenants' requests do not end with the run's own training."""

    def _begin(self, asked: AnswerGroup) -> None:
        left = {index for index in asked.wanted if (asked.group_id, index) not in self._ended}
        slots = [Slot(is_over=index not in left) for index in range(asked.end)]
        group = RolloutGroup(
            asked.group_id,
            asked.seed,
            slots,
            self,
            num_ended=sum(slot.is_over for slot in slots),
            sampling=asked.sampling,
            tenant=self._names.of(asked.tenant_id),
            adapter=asked.policy_version,
            only_checked=asked.is_checked,
            prompt_tokens=len(asked.prompt_ids),
            expected_tokens=min(self.lengths.mean_tokens, asked.sampling.max_tokens),
        )
        if not group.complete:
            self._open[asked.group_id] = asked
            self._ledger.open_group(group)

    def _forget_if_over(self, group_id: int) -> None:
        if group_id not in self._ledger.groups:
            self._open.pop(group_id, None)
