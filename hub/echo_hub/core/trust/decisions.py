"""Decisions about nodes: to suspect, quarantine, spare or release one. Each decision changes the node's standing, is
recorded, and is told to the node.

No node is quarantined for failures that many nodes show on one version or problem (`common_faults`), or for coarse
rounding that several nodes of its class share without having a common owner (`numerics`).
"""

from __future__ import annotations

from collections.abc import Iterable

from echo_hub.core.accounting.effects import CoarseClassesRecorded, StandingRecorded, TellStandby, TrustDecided
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.trust.common_faults import Cause, CommonFaults
from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.forgetting import Forgetting
from echo_hub.core.trust.lagging import Lagging
from echo_hub.core.trust.numerics import LEAST_TOKENS
from echo_hub.core.trust.reasons import CLASS_WIDE, convicting, what_is_wrong
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import Decision, Standing, Standings, StandingState
from echo_hub.core.trust.under_check import UnderCheck
from echo_shared.wire.messages import StandbyReason


class Decisions:
    def __init__(
        self,
        settings: TrustSettings,
        *,
        standings: Standings,
        under_check: UnderCheck,
        forgetting: Forgetting,
        lagging: Lagging,
        nodes: Nodes,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._standings = standings
        self._under_check = under_check
        self._forgetting = forgetting
        self._lagging = lagging
        self._nodes = nodes
        self._out = out
        self.faults = CommonFaults()
        self.num_quarantined = 0
        self._condemned_for: dict[str, tuple[Cause, ...]] = {}
        """For each node quarantined since the hub's start: possible causes of its failures other than the node."""

    def begin_again(self, standing: Standing, state: StandingState, reason: str, now: float) -> None:
        """Put the node into the state `state`, in which it must prove itself again by passed checks. Remove the node's
        tokens from those from which the rounding scale of its numerics class (kind of engine) is learned.
        """
        self._standings.numerics.unlearn(standing.numerics, standing.taught)
        standing.shown = standing.taught = NO_EVIDENCE
        standing.begin_again(state, reason, now)
        self._under_check.changed(standing.node_id)

    def suspect(self, standing: Standing, reason: str, now: float) -> None:
        """Make a node suspect after a hint of the learner, which found its rollouts unusual. The next hint counts only
        after 2 · (checks so far + `first_checked`) checks of the node: an honest node whose numerics differ from the
        learner's would get hints again and again."""
        if not standing.is_quarantined and standing.num_checked >= standing.hints_from:
            standing.hints_from = 2 * (standing.num_checked + self._settings.first_checked)
            self.begin_again(standing, StandingState.SUSPECT, reason, now)
            self._under_check.begin_all(standing.node_id)
            self._out.record(StandingRecorded(row=standing.row))

    def distrust(self, node_id: str, reason: str, now: float) -> None:
        standing = self._standings.of(node_id)
        if not standing.is_quarantined:
            self.begin_again(standing, StandingState.SUSPECT, reason, now)
            self._out.record(StandingRecorded(row=standing.row))

    def condemn(self, standing: Standing, causes: tuple[Cause, ...], rollout_id: str, now: float) -> None:
        """Quarantine the node, unless many nodes fail for one of `causes`, or several nodes without a common owner
        round as coarsely as the node. In these cases spare the node, and release nodes quarantined for the same
        cause."""
        if standing.is_quarantined:
            return
        reason, shown = what_is_wrong(standing), convicting(standing).shown
        common = self.faults.suspended(causes)
        if common is not None:
            self._spare(standing, f"Other nodes fail on {common[1]} {common[2]} too.", now)
            why = f"Many nodes fail ({common[0]} on {common[1]} {common[2]}), so the fault may not be theirs."
            self._release_all(
                [one for one in self.faults.failed(common) if common in self._condemned_for.get(one, ())], why, now
            )
        elif alike := self._as_coarse(standing):
            why = CLASS_WIDE.format(numerics=standing.numerics)
            self._spare(standing, why, now)
            self._release_all([one for one in alike if one in self._condemned_for], why, now)
        else:
            self._condemned_for[standing.node_id] = causes
            self.quarantine(standing, reason, now, rollout_id=rollout_id, evidence=shown)

    def _as_coarse(self, standing: Standing) -> list[str]:
        """Return all nodes of the node's numerics class that round as coarsely as the node, if enough of them have no
        common owner; otherwise none. The class then counts as coarser, which clears these nodes."""
        if self._settings.by_nodes:
            return []  # The evidence contains the rounding of the checking node, too.
        unlike, kin = [standing], set(standing.kin)
        for other in self._standings.of_class(standing.numerics):
            if other is not standing and other.recent.num_tokens >= LEAST_TOKENS and not kin & other.kin:
                unlike.append(other)
                kin |= other.kin
        alike = self._standings.numerics.class_wide(standing.numerics, [one.recent for one in unlike])
        if alike:
            self._out.record(CoarseClassesRecorded(classes=self._standings.numerics.coarser_than_measured))
        return [unlike[place].node_id for place in alike]

    def _release_all(self, node_ids: Iterable[str], why: str, now: float) -> None:
        for node_id in node_ids:
            other = self._standings.of(node_id)
            if other.is_quarantined:
                self.release(other, StandingState.SUSPECT, why, now)
                self.record(node_id, Decision.RELEASED, why, now)

    def _spare(self, standing: Standing, why: str, now: float) -> None:
        """Discard the evidence against the node and make it suspect. It gets no work for a while, as after returning
        work."""
        standing.acquit()
        self.begin_again(standing, StandingState.SUSPECT, why, now)
        self._nodes.fail(standing.node_id, now)
        self._out.record(StandingRecorded(row=standing.row))

    def quarantine(
        self, standing: Standing, reason: str, now: float, *, rollout_id: str = "", evidence: Evidence | None = None
    ) -> None:
        """Quarantine the node: it gets no work, and its rollouts outside of batches are dropped."""
        self.begin_again(standing, StandingState.QUARANTINED, reason, now)
        self.num_quarantined += 1
        self._nodes.quarantine(standing.node_id)
        self._forgetting.forget_node(standing.node_id, reason)
        self._out.record(StandingRecorded(row=standing.row))
        self.tell(standing)
        self.record(standing.node_id, Decision.QUARANTINED, reason, now, rollout_id=rollout_id, evidence=evidence)

    def release(self, standing: Standing, state: StandingState, reason: str, now: float) -> None:
        """Release the node from quarantine; it must prove itself again."""
        self.num_quarantined -= 1
        self._condemned_for.pop(standing.node_id, None)
        self._lagging.look_again(standing.node_id)
        standing.acquit()
        self.begin_again(standing, state, reason, now)
        self._nodes.release_from_quarantine(standing.node_id)
        self._out.record(StandingRecorded(row=standing.row))
        self.tell(standing)

    def tell(self, standing: Standing) -> None:
        """Tell a connected node about its quarantine or release."""
        node = self._nodes.get(standing.node_id)
        if node is not None and node.connected:
            node.told = StandbyReason.QUARANTINED if standing.is_quarantined else None
            detail = standing.reason if standing.is_quarantined else ""
            self._out.act(TellStandby(node_id=standing.node_id, reason=node.told, detail=detail))

    def record(
        self,
        node_id: str,
        decision: Decision,
        reason: str,
        now: float,
        *,
        rollout_id: str = "",
        evidence: Evidence | None = None,
    ) -> None:
        self._out.record(
            TrustDecided(
                node_id=node_id,
                decision=decision,
                reason=reason,
                rollout_id=rollout_id,
                evidence=evidence,
                decided_at=now,
            )
        )
