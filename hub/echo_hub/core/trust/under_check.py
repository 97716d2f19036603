"""Rollouts under check. A blocking check holds back the rollout's score until it ends; each check is answered once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from echo_hub.core.accounting.effects import CheckRollout, HastenChecks
from echo_hub.core.accounting.events import RolloutContinued, RolloutScored
from echo_hub.core.accounting.groups import LeasedRollout
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.answer_groups import is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.trust.checking import Checking
from echo_hub.core.trust.forgetting import Forgetting
from echo_shared.wire.messages import ReceiptState


class AwaitedStep(NamedTuple):
    """A turn that its environment gets only after the turn's check has passed."""

    rollout_id: str


Held = RolloutScored | RolloutContinued | AwaitedStep


@dataclass(slots=True, eq=False)
class Check:
    """Running check of one rollout, by the verifier or another node."""

    node_id: str
    """Node that the rollout was leased to."""
    group_id: int
    policy_version: int
    is_blocking: bool
    held: Held | None = None
    """Score, or the environment's answer, that arrived during the check and waits for its result; or the step of an
    environment that waits for it."""
    uses_capacity: bool = False
    """True if the rollout counts against its node's capacity until the check ends."""

    @property
    def must_pass(self) -> bool:
        """True if the rollout must not be used without a passed check: a tenant's sample that waits for its check, or a
        turn whose environment waits for it."""
        return self.is_blocking and (is_answer(self.group_id) or isinstance(self.held, AwaitedStep))


class UnderCheck:
    """All unfinished checks: by nodes if `checking` is given, else by the verifier."""

    def __init__(
        self, checking: Checking | None, *, ledger: Ledger, nodes: Nodes, forgetting: Forgetting, out: Outbox
    ) -> None:
        self._checking = checking
        self._ledger = ledger
        self._nodes = nodes
        self._forgetting = forgetting
        self._out = out
        self._checks: dict[str, Check] = {}
        self._patient: Counter[str] = Counter()
        """Number of each node's checks that wait for a fuller batch."""

    def __len__(self) -> int:
        return len(self._checks)

    def __contains__(self, rollout_id: object) -> bool:
        return rollout_id in self._checks

    def can_check(self, rollout: LeasedRollout) -> bool:
        """Return False for rollouts that cannot be checked: rollouts of the hub's own sampler and, with checks by
        nodes, greedy rollouts of evaluations."""
        about = EvaluationGroup.of(rollout.group_id)
        is_drawn = about is None or not about.greedy
        return rollout.node_id != HUB_NODE_ID and (is_drawn or self._checking is None)

    def changed(self, node_id: str) -> None:
        """Note that the node's trust standing changed, so that it may have gained or lost the right to check."""
        if self._checking is not None:
            self._checking.changed(node_id)

    def begin(
        self, rollout: LeasedRollout, *, is_blocking: bool, patience: int = 0, awaited: AwaitedStep | None = None
    ) -> None:
        """Begin the check of a rollout: once, and again after a restart. A check that does not block may wait for a
        fuller batch, unless more than `patience` checks of the same node wait already. `awaited`: the step that waits
        for this check."""
        rollout.is_checked = True
        check = Check(rollout.node_id, rollout.group_id, rollout.policy_version, is_blocking, awaited)
        self._checks[rollout.rollout_id] = check
        if is_blocking:
            self._block(rollout)
        self._ask(rollout, is_urgent=is_blocking)
        if not is_blocking and self._checking is None:
            self._patient[rollout.node_id] += 1
            if self._patient[rollout.node_id] > patience:
                self._hasten()

    def get(self, rollout_id: str) -> Check | None:
        return self._checks.get(rollout_id)

    def postpone(self, rollout_id: str) -> None:
        """Free the node's capacity that the rollout uses during its check, because no verifier can check the rollout
        now. The check stays open.
        """
        self._free_capacity(self._checks[rollout_id])

    def repeat(self, rollout_id: str) -> None:
        """Ask again for a check that was abandoned. A check whose rollout is gone ends."""
        rollout = self._ledger.rollouts.get(rollout_id)
        if rollout is None:
            self.answered(rollout_id)
        elif rollout_id in self._checks:
            self._ask(rollout, is_urgent=True)

    def _ask(self, rollout: LeasedRollout, *, is_urgent: bool) -> None:
        if self._checking is not None:
            unwilling = self._nodes.unwilling.of(self._ledger.groups[rollout.group_id].tenant)
            self._checking.want(rollout.rollout_id, rollout.drawers, rollout.policy_version, unwilling=unwilling)
        else:
            self._out.act(CheckRollout(rollout_id=rollout.rollout_id, is_urgent=is_urgent))

    def begin_all(self, node_id: str) -> None:
        """Begin blocking checks of all received rollouts with tokens of this node that are in no batch. Takes
        O(unfinished rollouts); called seldom."""
        is_any_hastened = False
        for rollout in self._ledger.rollouts.values():
            has_come_in = node_id in rollout.drawers and rollout.state is not ReceiptState.LEASED
            if not has_come_in or self._forgetting.is_consumed(rollout) or not self.can_check(rollout):
                continue
            check = self._checks.get(rollout.rollout_id)
            if not rollout.is_checked:
                self.begin(rollout, is_blocking=True)
            elif check is not None and not check.is_blocking:
                check.is_blocking = is_any_hastened = True
                self._block(rollout)
        if is_any_hastened and self._checking is None:
            self._hasten()

    def holds(self, scored: RolloutScored | RolloutContinued) -> bool:
        """Return True if the score must wait for a blocking check. The check then keeps the score in `Check.held`."""
        check = self._checks.get(scored.rollout_id)
        if check is None or not check.is_blocking:
            return False
        check.held = scored
        return True

    def answered(self, rollout_id: str) -> Check | None:
        """Remove and return the rollout's check, which its verifier has answered. The rollout no longer waits for it.
        None: no check of the rollout is under way."""
        check = self._checks.pop(rollout_id, None)
        if check is not None:
            self._patient.pop(check.node_id, None)  # All waiting checks are computed together.
        if check is not None and check.is_blocking:
            self._free_capacity(check)
            rollout = self._ledger.rollouts.get(rollout_id)
            if rollout is not None:
                self._forgetting.release(rollout)
        return check

    def _hasten(self) -> None:
        self._patient.clear()
        self._out.act(HastenChecks())

    def _block(self, rollout: LeasedRollout) -> None:
        """Hold back the rollout's score until the check ends. Until then, the rollout also uses capacity of its
        node.
        """
        self._checks[rollout.rollout_id].uses_capacity = True
        self._nodes.wait_for_check(rollout.node_id, 1)
        if rollout.state is ReceiptState.SCORED:
            self._forgetting.hold(rollout)

    def _free_capacity(self, check: Check) -> None:
        if check.uses_capacity:
            check.uses_capacity = False
            self._nodes.wait_for_check(check.node_id, -1)
