"""Trust in nodes: selection of rollouts for checks, and decisions from the verifier's findings.

    received ──> is it checked? ──CheckRollout──> the verifier ──> RolloutChecked ──> judged, node by node
                    │  new, suspect and watched nodes: always, and the score is held until the verdict
                    └  other proven nodes: a sample, concurrently with training

Each verdict counts for the node that sampled the tokens, whichever node returned them (`judging`). A node with more
evidence against it than honest nodes usually have is *watched*: all its rollouts are checked. From half of the
conviction threshold on, a node is *suspect*: the node needs a new proof, and the hub checks its rollouts outside of
batches. A convicted node is quarantined until the operator pardons it. A quarantined node gets no work, and its
rollouts outside of batches are dropped. Failures that many nodes share quarantine none (`decisions`).

A checked rollout is judged once more when its reward is known: a node must not choose tokens by reward and pass that
off as rounding (`shopping`).

An environment that must see only checked turns (`SessionRules.verify_first`) gets each turn after its check. Such a
turn is always checked, and an abandoned check of it is repeated.

The same rule selects tenants' samples for checks. If a tenant wants only checked samples, the hub checks all samples of
this tenant. The hub never delivers a sample whose check is still missing: an abandoned check is repeated.

The verifier measures how coarsely each kind of engine rounds with the run's own model, before it checks a rollout of
that kind, and again as the policy changes. The verifier's checks have no time limit here; a check that it abandons
counts as no check.

With `by_nodes` there is no verifier. Nodes check each other (`checking`), and verdicts allow for the differences
between two honest engines (`pairs`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from math import inf, log
from typing import Final

from echo_hub.core.accounting.effects import (
    ActionSettled,
    CheckingCredited,
    CheckRecorded,
    LookUpReceipt,
    MeasureNumerics,
    StandingRecorded,
    TellOperator,
)
from echo_hub.core.accounting.events import (
    CheckAbandoned,
    CheckReturned,
    NodeVouchedFor,
    NumericsMeasured,
    RolloutChecked,
    RolloutContinued,
    RolloutScored,
)
from echo_hub.core.accounting.groups import LeasedRollout
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.answer_groups import is_answer
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.trust.checking import Checking, CheckOutcome
from echo_hub.core.trust.common_faults import Cause
from echo_hub.core.trust.decisions import Decisions
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.forgetting import Forgetting
from echo_hub.core.trust.judging import Alternative, added, alarm, judged, proof_added
from echo_hub.core.trust.lagging import Lag, Lagging
from echo_hub.core.trust.numerics import CoarseClass, Honest, Numerics, NumericsClass
from echo_hub.core.trust.rate import is_drawn, long_proven, patience, share_checked, worth
from echo_hub.core.trust.reasons import (
    BY_OPERATOR,
    CHANGED,
    DISPROVED,
    DOUBTFUL,
    OUTVOTED,
    UNTRAINABLE,
    what_is_wrong,
    why_not,
)
from echo_hub.core.trust.scorers import ScoringPairs
from echo_hub.core.trust.screening import Mismatch, Seen, standing_out
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.shopping import Edges, Shopping, edges, weigh
from echo_hub.core.trust.standing import Decision, Standing, StandingRow, Standings, StandingState
from echo_hub.core.trust.under_check import AwaitedStep, Check, Held, UnderCheck
from echo_shared.records.node import TrustStatus
from echo_shared.wire.messages import Checked, DropReason, ReceiptState
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

DOUBT: Final = 0.5
"""If the evidence against a node exceeds this share of the conviction threshold, the node is suspect and must prove
itself again."""
WATCHED: Final = 0.1
"""While the evidence against a node exceeds this share of the conviction threshold, the node is watched: all its
rollouts are checked."""
WATCHED_FOR_REWARDS: Final = 0.25
"""Share of the conviction threshold above which the test of rewards (`shopping`) makes a node watched: all its rollouts
are checked. Rewards tell less than tokens, so honest nodes often reach a tenth of the threshold."""
CLASS_CAUSE: Final = ("versions from", 0)
"""Cause under which verdicts of the test of rewards are counted, for each numerics class (kind of engine) and for any
policy version. If many nodes of a class fail the test, the cause is the class, not the nodes."""
REPEAT_S: Final = 30.0
"""Seconds after which an abandoned check is repeated, for rollouts that must not be used unchecked."""
PROVEN_ANYWAY: Final = 8
"""A node with this many times `first_checked` rollouts verified in a row counts as proven even if its draws prove
little. That happens with a policy that is sure of every token, where a forger could change little."""


class Trust:
    """Judges nodes by their checked rollouts and the learner's findings."""

    def __init__(self, settings: TrustSettings, *, ledger: Ledger, nodes: Nodes, out: Outbox) -> None:
        self._settings = settings
        self._ledger = ledger
        self._nodes = nodes
        self._out = out
        self._forgetting = Forgetting(ledger)
        self._numerics = Numerics(settings.temperature, gguf_precision=settings.gguf_precision)
        self._standings = Standings(self._numerics)
        self._checking = Checking(
            secret=settings.secret,
            deadline_s=settings.check_deadline_s,
            alarm=alarm(settings.false_alarm),
            doubt=DOUBT * alarm(settings.false_alarm),
            standings=self._standings,
            out=out,
        )
        """Checks by nodes; used only with the setting `by_nodes`."""
        self.scorers = ScoringPairs(self._standings, alarm=alarm(settings.false_alarm))
        """Pairs of nodes that compute log-probabilities for tenants."""
        checking = self._checking if settings.by_nodes else None
        self._under_check = UnderCheck(checking, ledger=ledger, nodes=nodes, forgetting=self._forgetting, out=out)
        self._mismatch = Mismatch()
        self._lagging = Lagging()
        self._shopping = Shopping()
        self._decisions = Decisions(
            settings,
            standings=self._standings,
            under_check=self._under_check,
            forgetting=self._forgetting,
            lagging=self._lagging,
            nodes=nodes,
            out=out,
        )
        self._alarm = alarm(settings.false_alarm)
        self._proof = log(settings.miss)
        self._checked: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._num_abandoned = 0
        self._repeated: deque[tuple[float, str]] = deque()
        """Abandoned checks to repeat: time and rollout, the earliest first."""

    @property
    def status(self) -> TrustStatus:
        return TrustStatus(
            checks=dict(self._checked),
            failed_checks=dict(self._failed),
            abandoned_checks=self._num_abandoned,
            waiting_checks=len(self._under_check),
            quarantined=self._decisions.num_quarantined,
            checkers=self._checking.num_checkers,
            opinions=self._checking.num_opinions,
            disagreements=self._checking.num_disagreements,
            outvoted=self._checking.num_outvoted,
            checked_tokens=self._checking.num_tokens,
            mismatch=self._mismatch.largest,
            lagging=tuple((lag.node_id, str(lag)) for lag in self._lagging.lags),
            suspended=tuple(
                f"{numerics} on {kind} {number}" for numerics, kind, number in self._decisions.faults.all_suspended
            ),
            coarser=tuple(
                f"{numerics} (draws {draws:.2g}, claims {claims:.2g} nats)"
                for numerics, draws, claims in self._numerics.coarser_than_measured
            ),
        )

    # --- events

    def restore(self, rows: Iterable[StandingRow], coarse: Iterable[CoarseClass] = ()) -> None:
        """Restore the trust standings and the numerics classes that proved coarse (`CoarseClass`), as they were before
        the hub's restart. Call this before adding nodes or rollouts.
        """
        self._numerics.restore(coarse)
        for row in rows:
            standing = self._standings.restore(row)
            if standing.is_proven:
                standing.share = self._share(standing)
            elif standing.is_quarantined:
                self._decisions.num_quarantined += 1
                self._nodes.quarantine(standing.node_id)

    @property
    def due_at(self) -> float:
        """Return the time of the next timer of checks by nodes, or of the next check to repeat; inf = none."""
        return min(self._checking.due_at, self._repeated[0][0] if self._repeated else inf)

    def connected(self, node_id: str, numerics: NumericsClass, now: float, *, kin: Iterable[str] = ()) -> None:
        """Note that a node connected. Call this after `Nodes.connect`. `kin`: its network address and its invite; nodes
        that share one of them count as nodes of one owner. If the node reports no precision, the last reported one
        stays valid."""
        standing = self._standings.connected(node_id, kin)
        self._lagging.forget(node_id)
        if self._settings.by_nodes:
            self._checking.connected(node_id)
        if standing.is_quarantined:
            self._decisions.tell(standing)
        if not numerics.precision and numerics == standing.numerics._replace(precision=""):
            return
        self._change_engine(standing, numerics, now)

    def disconnected(self, node_id: str) -> None:
        if self._settings.by_nodes:
            self._checking.disconnected(node_id)
        self.scorers.disconnected(node_id)
        self._standings.disconnected(node_id)

    def reported(
        self, node_id: str, precision: str, now: float, *, checks: int = 0, policy_version: int | None = None
    ) -> None:
        """Store a node's report about its engine. Empty `precision`: not reported. `policy_version`: newest version the
        node has."""
        if self._settings.by_nodes:
            self._checking.reported(node_id, checks, policy_version)
        self.scorers.reported(node_id, checks, policy_version)
        if precision:
            standing = self._standings.of(node_id)
            if standing.numerics.precision != precision:
                self._change_engine(standing, standing.numerics._replace(precision=precision), now)
            if policy_version is not None:
                # Measure before the first rollout, so that the rollout need not wait.
                self._measure(standing.numerics, policy_version)

    def received(self, rollout: LeasedRollout) -> None:
        """Decide whether a received or restored rollout is checked, and start its check."""
        if not self._settings.enabled or not self._under_check.can_check(rollout):
            return
        awaits_step = self.checks_first(rollout)
        standing = self._standings.of(rollout.node_id)
        self._measure(standing.numerics, rollout.policy_version)
        share, is_blocking = standing.share, not standing.is_proven or self._is_watched(standing)
        if awaits_step or self._ledger.groups[rollout.group_id].only_checked:
            share, is_blocking = 1.0, True
        for node_id in rollout.drawn_by:
            other = self._standings.of(node_id)
            self._measure(other.numerics, rollout.policy_version)
            share = max(share, other.share)
            is_blocking = is_blocking or not other.is_proven or self._is_watched(other)
        if share >= 1.0 or is_drawn(self._settings.secret, rollout.rollout_id, share):
            self._under_check.begin(
                rollout,
                is_blocking=is_blocking,
                patience=patience(standing.num_verified),
                awaited=AwaitedStep(rollout.rollout_id) if awaits_step else None,
            )

    def checks_first(self, rollout: LeasedRollout, checked: Checked = Checked.NO) -> bool:
        """Return True if the rollout's environment gets the turn only after the turn's check. The check's end then
        returns an AwaitedStep. `checked`: result of the rollout's check before a restart."""
        session = self._ledger.groups[rollout.group_id].session
        return (
            session is not None
            and session.verify_first
            and self._settings.enabled
            and rollout.state in (ReceiptState.LEASED, ReceiptState.RECEIVED)
            and checked is Checked.NO
            and self._under_check.can_check(rollout)
        )

    def holds(self, scored: RolloutScored | RolloutContinued) -> bool:
        """Return True if a score must wait until the rollout's check ends. `checked`, `returned`, `abandoned` or
        `advance` then returns the score."""
        return self._under_check.holds(scored)

    def _measure(self, numerics: NumericsClass, policy_version: int) -> None:
        """Have the verifier measure the class's rounding if that is due, before it gets rollouts of this version. With
        `by_nodes` there is no verifier, and the default scales apply."""
        is_verified = self._settings.enabled and not self._settings.by_nodes
        if policy_version >= FIRST_TENANT_VERSION:
            policy_version = 0  # A tenant's adapter says nothing about how the run's own policy has changed.
        if is_verified and self._numerics.is_due(numerics.rounding, policy_version):
            self._out.act(MeasureNumerics(rounding=numerics.rounding, policy_version=policy_version))

    def measured(self, event: NumericsMeasured) -> None:
        """Store the verifier's measurement of a rounding. If the measurement failed, the earlier one stays, and the
        next version triggers another attempt."""
        if event.evidence is not None:
            self._numerics.measured(event.rounding, event.evidence)
        else:
            self._numerics.not_measured(event.rounding, event.policy_version)

    def abandoned(self, event: CheckAbandoned, now: float) -> Held | None:
        """Give up a check that the verifier cannot do. Return the score that was held back for it."""
        self._checking.forget(event.rollout_id)
        return self._given_up(event.rollout_id, now)

    def _given_up(self, rollout_id: str, now: float) -> Held | None:
        """End a check without a result, or plan to repeat it. Return the score that was held back for it."""
        check = self._under_check.get(rollout_id)
        if check is None:
            return None
        self._num_abandoned += 1
        if check.must_pass and rollout_id in self._ledger.rollouts:
            self._under_check.postpone(rollout_id)
            self._repeated.append((now + REPEAT_S, rollout_id))
            return None
        self._under_check.answered(rollout_id)
        return check.held

    def checked(self, event: RolloutChecked, now: float) -> Held | None:
        """Judge nodes by the verifier's findings. Return the held-back score if the ledger still has the rollout."""
        return self._conclude(event.rollout_id, tuple((*span, None) for span in event.spans), now)

    def returned(self, event: CheckReturned, now: float) -> Held | None:
        """Process the finding of a node that checked a rollout. Return the held-back score if the check is decided
        now."""
        outcome = self._checking.returned(event.node_id, event.rollout_id, event.finding)
        return None if outcome is None else self._take(outcome, now)

    def advance(self, now: float) -> Iterable[Held]:
        """Ask nodes for checks. Return the scores that were held back for checks now given up."""
        while self._repeated and self._repeated[0][0] <= now:
            self._under_check.repeat(self._repeated.popleft()[1])
        if not self._settings.by_nodes:
            return ()
        return [held for outcome in self._checking.advance(now) if (held := self._take(outcome, now)) is not None]

    def _take(self, outcome: CheckOutcome, now: float) -> Held | None:
        for node_id, num_tokens in outcome.agreed:
            self._out.record(CheckingCredited(node_id=node_id, num_tokens=num_tokens))
        for node_id in outcome.outvoted:
            self._decisions.distrust(node_id, OUTVOTED, now)
        for node_id in outcome.disproved:
            self._decisions.distrust(node_id, DISPROVED, now)
        if outcome.spans:
            return self._conclude(outcome.rollout_id, outcome.spans, now)
        if outcome.is_known:
            return None
        rollout = self._ledger.rollouts.get(outcome.rollout_id)
        if outcome.is_doubtful and rollout is not None and not self._forgetting.is_consumed(rollout):
            if self._under_check.answered(outcome.rollout_id) is not None:
                self._num_abandoned += 1
                self._forgetting.set_aside(rollout, DOUBTFUL)
            return None
        return self._given_up(outcome.rollout_id, now)

    def _conclude(
        self, rollout_id: str, spans: tuple[tuple[str, Evidence, Honest | None], ...], now: float
    ) -> Held | None:
        """Judge the nodes that sampled a checked rollout. `spans`: for each part, the sampling node, the evidence and,
        if a node checked it, the rounding scales of both nodes together (None: the verifier checked it)."""
        check = self._under_check.answered(rollout_id)
        if check is None:
            return None
        failed, doubted, found = [], [], []
        for node_id, evidence, found_by_node in spans:
            standing = self._standings.of(node_id)
            before = max(standing.sums)
            # Greedy tokens tell little about a rounding scale, so the class learns nothing from them.
            learns = found_by_node is None and evidence.num_claims > 0
            honest = found_by_node or self._numerics.honest(
                standing.numerics, without=standing.taught, shown=standing.recent
            )
            if self._judge(standing, evidence, check, now, honest, learns=learns):
                failed.append(node_id)
                continue
            found.append(edges(node_id, evidence, honest))
            if max(standing.sums) > before:
                doubted.append(node_id)
        self._tell_checked(rollout_id, check, failed)
        if not failed and self._is_too_doubtful(rollout_id, doubted):
            return None
        for node_id in failed:
            standing = self._standings.of(node_id)
            self._decisions.condemn(standing, _causes(standing, check), rollout_id, now)
        # A tenant's sample has no reward here by which its node could choose tokens.
        rank = None if is_answer(check.group_id) else self._shopping.checked(rollout_id, found)
        if rank is not None:
            self._weigh_rewards(rollout_id, rank, found, now)
        return check.held if rollout_id in self._ledger.rollouts else None

    def _is_too_doubtful(self, rollout_id: str, doubted: Iterable[str]) -> bool:
        """Drop a tenant's sample that must be checked, if its check raised the evidence against nodes that drew it
        (`doubted`), and one of these nodes is watched now. One short sample cannot convict a forger, so another node
        draws the sample. Other samples of a watched node are delivered: it may be the only node."""
        rollout = self._ledger.rollouts.get(rollout_id)
        if rollout is None or not self._ledger.groups[rollout.group_id].only_checked:
            return False
        if not any(self._is_watched(self._standings.of(node_id)) for node_id in doubted):
            return False
        self._ledger.blame(rollout)
        self._forgetting.set_aside(rollout, DOUBTFUL)
        return True

    def scored(self, rollout_ids: Iterable[str], reward: float, now: float) -> None:
        """Judge the checked turns of an episode, `rollout_ids`, by its reward."""
        if self._settings.enabled:
            rank, checked = self._shopping.scored(rollout_ids, reward, self._under_check)
            for rollout_id, found in checked:
                self._weigh_rewards(rollout_id, rank, found, now)

    def _weigh_rewards(self, rollout_id: str, rank: float, found: Iterable[Edges], now: float) -> None:
        for one in found:
            standing = self._standings.of(one.node_id)
            if standing.is_quarantined:
                continue
            excess = standing.usual_rank.excess(rank, one)
            standing.weigh_rewards(added(standing.sums, weigh(one, excess)), one.counts)
            failed = max(standing.sums) >= self._alarm
            cause = (standing.numerics, *CLASS_CAUSE)
            self._decisions.faults.note(cause, standing.node_id, is_established=standing.is_proven, failed=failed)
            if failed:
                standing.num_failed += 1
                self._failed[str(standing.numerics)] += 1
                self._decisions.condemn(standing, (cause,), rollout_id, now)
            elif not self._doubts(standing, now) and standing.is_proven:
                standing.share = self._share(standing)

    def screened(self, step: int, screened: Iterable[Seen], now: float) -> None:
        """Process what the learner computed about one step's rollouts under the policy that the step trained. The test
        compares a node with nodes of equal rounding in the same step, and with the node's own past.
        """
        screened = tuple(screened)
        self._mismatch.add(screened)
        of_nodes = [seen for seen in screened if seen.node_id != HUB_NODE_ID]
        kinds = {name: self._standings.of(name).numerics.kind for name in {seen.node_id for seen in of_nodes}}
        for lag in self._lagging.add(step, of_nodes, kinds):
            self._lags(lag, now)
        if not self._settings.enabled:
            return
        alike: dict[str, list[Seen]] = {}
        for seen in screened:
            alike.setdefault(self._standings.of(seen.node_id).numerics.rounding, []).append(seen)
        for among in alike.values():
            for node_id, weight in standing_out(among, self._alarm * DOUBT).items():
                reason = f"The learner finds its rollouts unlike other nodes' ({weight:.1f} nats)."
                self._decisions.suspect(self._standings.of(node_id), reason, now)

    def _lags(self, lag: Lag, now: float) -> None:
        """Act on a node that seems to sample with an old version. With checks, the node becomes suspect, so its
        rollouts are checked before training. Without checks, only a quarantine keeps its rollouts out of training. A
        quarantine requires that the mismatch of other nodes has not grown: otherwise the run itself may be the
        cause."""
        standing = self._standings.of(lag.node_id)
        if self._settings.enabled:
            self._decisions.suspect(standing, str(lag), now)
        elif not (lag.is_alone or standing.is_quarantined):
            self._decisions.quarantine(standing, str(lag), now)

    def suspected(self, node_ids: Iterable[str], now: float) -> None:
        """Make nodes suspect because the learner left out a group of a step, or did not apply an update, and their
        rollouts were the cause.
        """
        if self._settings.enabled:
            for node_id in node_ids:
                self._decisions.suspect(self._standings.of(node_id), UNTRAINABLE, now)

    def pardon(self, node_id: str, now: float) -> None:
        """Release a quarantined node at the operator's wish. For other nodes, only log the pardon."""
        standing = self._standings.get(node_id)
        if standing is not None and standing.is_quarantined:
            self._decisions.release(standing, StandingState.NEW, "", now)
        self._decisions.record(node_id, Decision.PARDONED, BY_OPERATOR, now)

    def vouched(self, event: NodeVouchedFor, now: float) -> None:
        """Set a node to proven, so that the lowest share of its rollouts is checked, or back to new, as the operator
        wishes.
        """
        standing = self._standings.get(event.node_id)
        refusal = why_not(standing, is_trusted=event.is_trusted)
        if standing is None or refusal:
            self._out.record(ActionSettled(number=event.number, done=False, detail=refusal))
        else:
            before = standing.state
            self._decisions.begin_again(standing, StandingState.NEW, BY_OPERATOR, now)
            standing.acquit()
            if event.is_trusted:
                standing.state = StandingState.PROVEN
                standing.num_verified = long_proven(self._settings.first_checked, self._settings.least_checked)
                standing.share = self._share(standing)
                self._under_check.changed(standing.node_id)
            decision = Decision.TRUSTED if event.is_trusted else Decision.DISTRUSTED
            self._out.record(StandingRecorded(row=standing.row))
            self._decisions.record(standing.node_id, decision, BY_OPERATOR, now)
            self._out.record(ActionSettled(number=event.number, done=True, before=before, after=standing.state))
        self._out.act(TellOperator(number=event.number))

    # --- decisions

    def _is_watched(self, standing: Standing) -> bool:
        of_tokens, of_rewards = standing.sums[: Alternative.SHOPPED], standing.sums[Alternative.SHOPPED :]
        return max(of_tokens) > WATCHED * self._alarm or max(of_rewards) > WATCHED_FOR_REWARDS * self._alarm

    def _share(self, standing: Standing) -> float:
        if self._is_watched(standing):
            return 1.0
        return share_checked(standing.num_verified, self._settings.first_checked, self._settings.least_checked)

    def _change_engine(self, standing: Standing, numerics: NumericsClass, now: float) -> None:
        """Store what the node reports about its engine. A proven node whose engine changed must prove itself again."""
        numerics = self._numerics.known(numerics)
        if standing.is_proven and standing.numerics != numerics:
            self._decisions.begin_again(standing, StandingState.NEW, CHANGED, now)
            self._out.record(StandingRecorded(row=standing.row))
        standing.numerics = numerics

    def _judge(
        self, standing: Standing, evidence: Evidence, check: Check, now: float, honest: Honest, *, learns: bool
    ) -> bool:
        """Judge a node by this evidence, and return True if it is convicted. Otherwise the evidence counts for the
        node, or makes it suspect. `learns`: also add the evidence to that from which the rounding scale of the node's
        numerics class (kind of engine) is learned."""
        sums = judged(standing.sums, evidence, standing.recent, honest, self._alarm)
        failed = max(sums) >= self._alarm
        self._checked[str(standing.numerics)] += 1
        # Add even 0: both counters need an entry for every checked class.
        self._failed[str(standing.numerics)] += failed
        standing.num_checked += 1
        standing.num_failed += failed
        standing.checked_at = now
        if standing.is_quarantined:
            self._out.record(StandingRecorded(row=standing.row))
            return failed
        for cause in _causes(standing, check):
            self._decisions.faults.note(cause, standing.node_id, is_established=standing.is_proven, failed=failed)
        standing.weigh(sums, evidence)
        standing.show(evidence)
        if not failed:
            self._believe(standing, evidence, honest, now, learns=learns)
            self._out.record(StandingRecorded(row=standing.row))
        return failed

    def _believe(self, standing: Standing, evidence: Evidence, honest: Honest, now: float, *, learns: bool) -> None:
        if self._doubts(standing, now):
            return
        standing.num_verified += worth(evidence.num_tokens)
        standing.proof = proof_added(standing.proof, evidence, honest)
        if not standing.is_proven:
            first = self._settings.first_checked
            is_shown = standing.proof <= self._proof or standing.num_verified >= PROVEN_ANYWAY * first
            if standing.num_verified < first or not is_shown:
                return
            standing.state, standing.reason, standing.since = StandingState.PROVEN, "", now
            self._under_check.changed(standing.node_id)
        standing.share = self._share(standing)
        if learns:
            standing.shown += evidence.counts
            standing.taught += evidence
            self._numerics.learn(standing.numerics, evidence)

    def _doubts(self, standing: Standing, now: float) -> bool:
        """Return True if the evidence against the node makes it suspect. Its count of verified rollouts then restarts
        at 0."""
        if max(standing.sums) <= DOUBT * self._alarm:
            return False
        if standing.is_proven or standing.num_verified:
            self._decisions.begin_again(standing, StandingState.SUSPECT, what_is_wrong(standing), now)
            self._under_check.begin_all(standing.node_id)
            self._out.record(StandingRecorded(row=standing.row))
        return True

    def _tell_checked(self, rollout_id: str, check: Check, failed: Collection[str]) -> None:
        """Record the check's result and tell it to the node. If the rollout is forged and in no batch, drop it."""
        checked = Checked.FAILED if check.node_id in failed else Checked.PASSED
        self._out.record(CheckRecorded(rollout_id=rollout_id, checked=checked))
        rollout = self._ledger.rollouts.get(rollout_id)
        if rollout is None:  # The rollout is finished, so only the store knows its state.
            self._out.act(LookUpReceipt(node_id=check.node_id, rollout_id=rollout_id, is_verdict=True))
            return
        self._out.receipt(check.node_id, rollout_id, rollout.state, checked=checked)
        if failed and not self._forgetting.is_consumed(rollout):
            is_its_own = check.node_id in failed
            detail = what_is_wrong(self._standings.of(check.node_id)) if is_its_own else ""
            self._forgetting.forget_rollout(rollout, DropReason.FORGED, detail, is_its_own=is_its_own)


def _causes(standing: Standing, check: Check) -> tuple[Cause, ...]:
    """Return the possible causes of a failed check other than the node: the policy version, and the problem (group)."""
    return (
        (standing.numerics, "version", check.policy_version),
        (standing.numerics, "group", check.group_id),
    )
