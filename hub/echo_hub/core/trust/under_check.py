"""Rollouts that are being checked: begun, waited for where that blocks, and answered for once each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from echo_hub.core.effects import CheckRollout, HastenChecks
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.events import RolloutContinued, RolloutScored
from echo_hub.core.groups import LeasedRollout
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.outbox import Outbox
from echo_hub.core.trust.checking import Checking
from echo_hub.core.trust.forgetting import Forgetting
from echo_shared.messages import ReceiptState

Held = RolloutScored | RolloutContinued


@dataclass(slots=True, eq=False)
class Check:
    """A rollout that somebody computes again."""

    node_id: str
    """That it was leased to."""
    group_id: int
    policy_version: int
    is_blocking: bool
    held: Held | None = None
    """What the scorer has said of it meanwhile."""


class UnderCheck:
    """By nodes where there is a `checking`, else by the verifier."""

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
        """Checks of each node that wait for company."""

    def __len__(self) -> int:
        return len(self._checks)

    def __contains__(self, rollout_id: object) -> bool:
        return rollout_id in self._checks

    def can_check(self, rollout: LeasedRollout) -> bool:
        """Not what the hub draws itself. A node that checks is not asked for the most likely ids."""
        about = EvaluationGroup.of(rollout.group_id)
        is_drawn = about is None or not about.greedy
        return rollout.node_id != HUB_NODE_ID and (is_drawn or self._checking is None)

    def begin(self, rollout: LeasedRollout, *, is_blocking: bool, patience: int = 0) -> None:
        """Once for each rollout, but after a restart. What does not block waits for company, as long as no more than
        `patience` of its node do."""
        rollout.is_checked = True
        check = Check(rollout.node_id, rollout.group_id, rollout.policy_version, is_blocking)
        self._checks[rollout.rollout_id] = check
        if is_blocking:
            self._block(rollout)
        if self._checking is not None:
            self._checking.want(rollout.rollout_id, rollout.drawers, rollout.policy_version)
            return
        self._out.act(CheckRollout(rollout_id=rollout.rollout_id, is_urgent=is_blocking))
        if not is_blocking:
            self._patient[rollout.node_id] += 1
            if self._patient[rollout.node_id] > patience:
                self._hasten()

    def begin_all(self, node_id: str) -> None:
        """What the node has drawn any of, has come in and is not consumed is checked, and blocks until it is. O(what is
        not final), as is seldom done."""
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

    def holds(self, scored: Held) -> bool:
        """Whether what the scorer says has to wait for the answer; `Check.held` keeps it until then."""
        check = self._checks.get(scored.rollout_id)
        if check is None or not check.is_blocking:
            return False
        check.held = scored
        return True

    def answered(self, rollout_id: str) -> Check | None:
        """It blocks no longer. None: it is not under check."""
        check = self._checks.pop(rollout_id, None)
        if check is not None:
            self._patient.pop(check.node_id, None)  # They go together.
        if check is not None and check.is_blocking:
            self._nodes.wait_for_check(check.node_id, -1)
            rollout = self._ledger.rollouts.get(rollout_id)
            if rollout is not None:
                self._forgetting.release(rollout)
        return check

    def _hasten(self) -> None:
        self._patient.clear()
        self._out.act(HastenChecks())

    def _block(self, rollout: LeasedRollout) -> None:
        """Its score is held until the verdict, and its node waits for that."""
        self._nodes.wait_for_check(rollout.node_id, 1)
        if rollout.state is ReceiptState.SCORED:
            self._forgetting.hold(rollout)
