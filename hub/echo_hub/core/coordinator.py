"""The coordinator: takes every event and returns all effects. It is pure: no I/O, no clock, no randomness.

A *turn* is one call with one or several events. Each event changes the state. Then the turn asks three questions,
whatever the event was. Can a step be planned? May groups be opened? Is there a node for the work that wants a lease? A
late or repeated event is harmless. An impossible event raises LocalProtocolError. After an error or a failed commit,
discard this object, which is ahead of the store, and build a new one.

Reading order: settings, events, effects, groups, ledger, nodes, policy, training, evaluating, answering, activation,
trust, returns, coordinator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final, assert_never

from echo_hub.core.accounting.effects import Effect, FinishRun, TellOperator
from echo_hub.core.accounting.events import (
    AnswerCancelled,
    AnswerWanted,
    CheckAbandoned,
    CheckReturned,
    EvaluationAbandoned,
    EvaluationWanted,
    Event,
    GroupPrepared,
    LearnerLost,
    LearnerReady,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodePardoned,
    NodeReported,
    NodeVouchedFor,
    NumericsMeasured,
    OperatorAsked,
    RolloutArrived,
    RolloutChecked,
    RolloutContinued,
    RolloutRejected,
    RolloutsBegun,
    RolloutScored,
    SessionDiverged,
    SessionLost,
    SlotsChanged,
    StepComputed,
    StepDone,
    Tick,
    VersionPublished,
    VersionUnusable,
)
from echo_hub.core.accounting.groups import GroupOwner, LeasedRollout
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.restoring import restore_failure, restore_rollout
from echo_hub.core.accounting.sessions import LostSessions
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.activation.activation import Activation
from echo_hub.core.activation.choice import Demand
from echo_hub.core.answering import Answering
from echo_hub.core.evaluating import Evaluating
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.operating import OVER, PAUSED, answer
from echo_hub.core.policy.admitting import Admitting
from echo_hub.core.policy.leasing import Leasing
from echo_hub.core.policy.outstanding import OutstandingLeases
from echo_hub.core.policy.session_slots import SessionSlots
from echo_hub.core.returns import Returns
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.status import CoordinatorStatus
from echo_hub.core.training import Training
from echo_hub.core.trust.scorers import ScoringPairs
from echo_hub.core.trust.trust import Trust
from echo_hub.core.trust.under_check import AwaitedStep, Held
from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import Checked, DropReason, ReceiptState


class Coordinator:
    """State machine of a run. Call `start` once, then `handle` for every event. Commit the records of each call before
    its actions."""

    def __init__(self, settings: CoordinatorSettings, snapshot: CoordinatorSnapshot) -> None:
        self._settings = settings
        self._out = Outbox()
        self._nodes = Nodes(settings.nodes)
        self._ledger = Ledger(nodes=self._nodes, out=self._out, discount=settings.discount)
        self._lost_sessions = LostSessions(ledger=self._ledger, out=self._out)
        self._slots = SessionSlots(self._ledger)
        self._training = Training(settings, snapshot, ledger=self._ledger, out=self._out)
        self._evaluating = Evaluating(settings, snapshot, ledger=self._ledger, slots=self._slots, out=self._out)
        self._answering = Answering(snapshot, ledger=self._ledger, out=self._out, names=settings.tenant_names)
        self._owners: tuple[GroupOwner, ...] = (self._training, self._evaluating, self._answering)
        checks = settings.trust if settings.mode != "colocated" else replace(settings.trust, enabled=False)
        self._trust = Trust(checks, ledger=self._ledger, nodes=self._nodes, out=self._out)
        self._outstanding = OutstandingLeases(ledger=self._ledger, nodes=self._nodes, out=self._out)
        self._leasing = Leasing(
            settings,
            ledger=self._ledger,
            nodes=self._nodes,
            outstanding=self._outstanding,
            beside=[owner for owner in self._owners if not owner.for_learner],
            next_lease_id=snapshot.next_lease_id,
        )
        self._activation = Activation(
            settings.activation, nodes=self._nodes, lengths=self._ledger.lengths, out=self._out
        )
        self._snapshot = snapshot
        self._admitting = Admitting(
            settings,
            training=self._training,
            ledger=self._ledger,
            slots=self._slots,
            out=self._out,
            next_group_id=snapshot.next_group_id,
        )
        self._returns = Returns(
            settings,
            ledger=self._ledger,
            nodes=self._nodes,
            training=self._training,
            answering=self._answering,
            trust=self._trust,
            activation=self._activation,
            out=self._out,
        )
        self._finished = False
        self._stood = -1
        """Value of `_num_changes` after the last turn that planned steps and leased work. While the counter has this
        value, a turn skips both; -1: the next turn does both in any case."""

    def start(self, now: float) -> list[Effect]:
        """Restore the snapshot's unfinished work, and return again the actions that a crash after a commit may have
        lost."""
        leases: defaultdict[tuple[float, int], list[int]] = defaultdict(list)
        self._nodes.published(self._snapshot.published_version)
        self._trust.restore(self._snapshot.standings, self._snapshot.coarse_classes)
        self._ledger.restore_losses(self._snapshot.sessions)
        self._training.restore(self._snapshot.groups)
        self._evaluating.restore(self._snapshot.rollouts)
        self._answering.restore(self._snapshot.answers)
        for row in self._snapshot.rollouts:
            rollout = restore_rollout(self._ledger, row, now)
            if rollout.state is ReceiptState.LEASED:
                leases[row.deadline, row.lease_id].append(row.index)
                continue
            if rollout.state is ReceiptState.RECEIVED and not self._trust.checks_first(rollout, row.checked):
                self._ledger.have_scored(rollout)
            if row.checked is Checked.NO:
                self._trust.received(rollout)
        for failure in self._snapshot.scorer_failures:
            restore_failure(self._ledger, *failure)
        for (deadline, lease_id), indices in leases.items():
            self._outstanding.watch(lease_id, tuple(indices), deadline)
        for planned in self._snapshot.planned:
            self._ledger.take_from_queues(planned.group_ids)
        self._give_back_hub_leases()
        self._evaluating.drop_what_settings_lack()
        self._heed_leasing(now)
        return self._turn(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event. `now` is in seconds since the epoch and never jumps back by much."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Sequence[Event], now: float) -> list[Effect]:
        """Handle several events together: plan steps and lease work only once, after the last event."""
        for event in events:
            HANDLERS[type(event)](self, event, now)
        if self._leasing.begin_turn(now):
            self._stood = -1
        if self._outstanding.due_at <= now:
            self._outstanding.look_after(now)
        return self._turn(now)

    def due_at(self) -> float | None:
        """Return the time at which the caller must send a Tick if no event comes earlier; None: never."""
        due = min(
            self._leasing.due_at,
            self._outstanding.due_at,
            self._nodes.next_end_of_rest,
            self._activation.due_at,
            self._trust.due_at,
        )
        return due if due < inf else None

    @property
    def settings(self) -> CoordinatorSettings:
        """Return the current settings, including operators' changes."""
        return self._settings

    @property
    def published_version(self) -> int:
        """Return the newest published version; 0 = only the base model."""
        return self._training.published_version

    @property
    def scorers(self) -> ScoringPairs:
        """Return the pairs of nodes that compute log-probabilities for tenants."""
        return self._trust.scorers

    def is_unusable(self, policy_version: int) -> bool:
        """Return True if nodes cannot use this adapter of a tenant."""
        return self._answering.is_unusable(policy_version)

    def is_proven(self, node_id: str) -> bool:
        """Return True if the node is proven (a rollout of it was scored) and not quarantined."""
        return self._nodes.is_proven(node_id)

    def status(self) -> CoordinatorStatus:
        """Return the present figures for dashboards. Takes O(nodes)."""
        waiting, complete = len(self._ledger.waiting), len(self._ledger.complete)
        return CoordinatorStatus(
            trained_steps=self._training.trained_steps,
            published_version=self._training.published_version,
            withdrawn=dict(self._training.usability.withdrawn),
            training_step=self._training.training,
            groups_preparing=self._admitting.num_preparing,
            groups_open=waiting - complete,
            groups_buffered=complete,
            groups_planned=sum(len(planned.group_ids) for planned in self._training.planned),
            nodes_connected=self._nodes.num_connected,
            leased_by_node=self._nodes.held_by_node,
            in_flight=len(self._ledger.rollouts),
            session_slots=self._slots.total,
            session_slots_used=self._slots.used(),
            lacks_session_slots=self._admitting.waits_for_slots,
            requests_open=self._answering.num_open,
            finished=self._finished,
            spend_per_hour=self._activation.spend_per_hour,
            nodes_priced=self._activation.num_priced,
            nodes_active=self._activation.num_active,
            trust=self._trust.status,
            curriculum=self._training.curriculum,
            settings=self._settings,
        )

    # --- one turn

    def _turn(self, now: float) -> list[Effect]:
        if now >= self._activation.due_at:
            self._activate(now)
        for held in self._trust.advance(now):
            self._go_on(held, now)
        self._nodes.wake(now)
        is_open = self._settings.leasing != "paused"
        if is_open and (self._evaluating.wanting or self._answering.wanting):
            self._leasing.dispatch_beside(now, within_share=True)
        if self._settings.trains and not self._finished and self._num_changes != self._stood:
            self._training.advance(now)
            if self._training.finished:
                self._finish(now)
            else:
                self._admit(now)
            self._stood = self._num_changes
        if is_open and (self._evaluating.wanting or self._answering.wanting):
            self._leasing.dispatch_beside(now, within_share=False)
        self._ledger.clear_away()
        return self._out.take()

    @property
    def _num_changes(self) -> int:
        """Return a counter of all changes of nodes, groups and learner that may have made a step or a lease possible.
        The passing of time does not count."""
        nodes, ledger, training = self._nodes, self._ledger, self._training
        return nodes.num_changes + ledger.wants.num_changes + ledger.num_queue_changes + training.num_changes

    def _admit(self, now: float) -> None:
        """Open as many groups as the staleness bound allows, and lease the open ones."""
        version = self._training.newest_to_lease
        if version is None or self._settings.leasing == "paused":
            return
        self._admitting.advance(version)
        self._leasing.dispatch(
            self._training,
            now,
            newest_version=version,
            outlook=self._admitting.outlook,
            tempo=self._training.tempo,
            num_changes=self._training.num_changes,
        )

    def _activate(self, now: float) -> None:
        """Decide which nodes are active (paid) and which are on standby. Lease a single rollout to each node whose
        speed should be measured again."""
        is_open = self._settings.leasing == "open" and not self._finished
        may_lease = is_open and self._training.newest_to_lease is not None
        for node in self._activation.advance(self._demand, now):
            given = self._leasing.lease_turn(node, now) if may_lease else None
            if given is not None:
                self._activation.had_turn(given, node.node_id, now)

    @property
    def _demand(self) -> Demand | None:
        """Return the learner's demand for rollouts; None until a step was trained and batch sizes are known."""
        step_s, groups = self._training.tempo.step_s, self._admitting.outlook.later_batches
        if not step_s or not groups:
            return None
        return Demand(
            rollouts_per_step=groups * self._settings.group_size,
            step_s=step_s,
            max_staleness=self._settings.staleness_bound,
            publish_every=self._settings.interval,
        )

    def _finish(self, now: float) -> None:
        self._finished = True
        self._activation.halt(OVER, now)
        for owner in self._owners:
            owner.end_run()
        self._leasing.end_run()
        self._activate(now)
        self._out.act(FinishRun())

    # --- nodes

    def _connected(self, event: NodeConnected, now: float) -> None:
        self._nodes.unwilling.connected(event.node_id, answers=event.answers, refuses=event.refuses)
        self._nodes.connect(event.node_id, event.cost_per_hour, origin=event.invite or event.origin)
        self._activation.connected(event.node_id, now)
        self._outstanding.came(event.node_id)
        self._trust.connected(event.node_id, event.numerics, now, kin=(event.origin, event.invite, event.owner))

    def _disconnected(self, event: NodeDisconnected, now: float) -> None:
        self._activation.disconnected(event.node_id, self._demand, now)
        self._nodes.disconnect(event.node_id)
        self._nodes.unwilling.disconnected(event.node_id)
        self._outstanding.left(event.node_id, now)
        self._trust.disconnected(event.node_id)

    def _reported(self, event: NodeReported, now: float) -> None:
        """Store a node's report. After a reconnect, a node first returns the leases that it will not finish, and then
        reports. So its remaining leases are sent again now."""
        version = event.policy_version
        if version is not None:
            version = min(version, self.published_version)  # A node may claim a version that does not exist.
        self._trust.reported(event.node_id, event.precision, now, checks=event.checks, policy_version=version)
        self._activation.reported(event.node_id, event.capacity, event.policy_version, now)
        self._nodes.report(event.node_id, event.capacity, event.policy_version, tokens_per_s=event.tokens_per_s)
        self._outstanding.send_again(event.node_id, now)

    # --- groups and scores

    def _group_prepared(self, event: GroupPrepared, now: float) -> None:
        if not self._finished:
            self._admitting.prepared(event)

    def _scored(self, event: RolloutScored, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.state is ReceiptState.RECEIVED and not self._trust.holds(event):
            self._ledger.note_scoring(rollout, now)
            rollout.components = event.components
            self._end_episode(rollout, event.reward, now)

    def _end_episode(self, rollout: LeasedRollout, reward: float, now: float) -> None:
        group = self._ledger.groups[rollout.group_id]
        turns = [turn.rollout_id for turn in group.slots[rollout.index].received]
        group.owner.end_episode(rollout, reward)
        if group.sampling is None:  # Samples of tenants have no reward that could be judged.
            self._trust.scored(turns, reward, now)

    def _continued(self, event: RolloutContinued, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.state is ReceiptState.RECEIVED and not self._trust.holds(event):
            self._ledger.go_on(rollout, event.observation_ids, turn_reward=event.turn_reward, now=now)

    def _rejected(self, event: RolloutRejected, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.state is not ReceiptState.RECEIVED:
            return
        group = self._ledger.groups[rollout.group_id]
        if event.killed_scorer:
            self._nodes.kill_scorer(rollout.node_id, group.group_id, now)
        if event.reason is DropReason.SCORER_FAILED:
            group.owner.scorer_failed(rollout, event.detail)
            return
        self._ledger.fail(rollout, event.reason, event.detail)
        if event.reason is DropReason.INVALID:
            self._nodes.fail(rollout.node_id, now)

    # --- sessions

    def _session_diverged(self, event: SessionDiverged, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.state is not ReceiptState.RECEIVED:
            return
        if not 0 <= event.turn < rollout.turn:
            raise LocalProtocolError(
                "A rebuilt session diverged at a turn that its rollout does not follow.",
                got=f"turn {event.turn} for rollout {event.rollout_id}, which is turn {rollout.turn}",
            )
        if self._lost_sessions.ends_episode(rollout, event):
            self._scored(event.if_lost, now)
            return
        turn = self._lost_sessions.diverge(rollout, event, now)
        if event.reward is not None:
            self._end_episode(turn, event.reward, now)

    def _session_lost(self, event: SessionLost, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.state is not ReceiptState.RECEIVED:
            return
        if self._lost_sessions.ends_episode(rollout, event):
            self._scored(event.if_lost, now)
        else:
            self._lost_sessions.start_again(rollout, event)

    def _slots_changed(self, event: SlotsChanged, now: float) -> None:
        self._slots.total = event.slots
        self._admitting.open_prepared()
        self._evaluating.ask_for_sessions()

    # --- trust

    def _go_on(self, held: Held | None, now: float) -> None:
        """Process the scorer's answer that was held back while the rollout was checked. `held` None: no answer was held
        back."""
        match held:
            case RolloutScored():
                self._scored(held, now)
            case RolloutContinued():
                self._continued(held, now)
            case AwaitedStep():
                rollout = self._ledger.rollouts.get(held.rollout_id)
                if rollout is not None and rollout.state is ReceiptState.RECEIVED:
                    self._ledger.have_scored(rollout)
            case None:
                pass
            case _:
                assert_never(held)

    # --- the operator

    def _operator_asked(self, event: OperatorAsked, now: float) -> None:
        step, published = self._training.next_step, self.published_version
        settings, records = answer(self._settings, event, next_step=step, published_version=published)
        for record in records:
            self._out.record(record)
        self._out.act(TellOperator(number=event.number))
        if settings is not self._settings:
            self._settings, self._stood = settings, -1
            self._admitting.change(settings)
            self._training.change(settings, now)
            self._leasing.change(settings)
            self._returns.change(settings)
            self._activation.change(settings.activation, self._demand, now)
            self._heed_leasing(now)

    def _heed_leasing(self, now: float) -> None:
        """Stop paying nodes while an operator has paused leasing. Otherwise open the groups whose problems were
        prepared meanwhile."""
        if not self._finished:
            self._activation.halt(PAUSED if self._settings.leasing == "paused" else "", now)
        self._admitting.open_prepared()

    # --- learner

    def _learner_lost(self, event: LearnerLost, now: float) -> None:
        self._training.learner_lost()
        self._give_back_hub_leases()

    def _give_back_hub_leases(self) -> None:
        self._ledger.drop(self._ledger.held_by(HUB_NODE_ID), DropReason.RETURNED, "the learner stopped")

    def _step_done(self, event: StepDone, now: float) -> None:
        screened, suspects = self._training.whose(event)
        self._training.step_done(event, now)
        self._trust.screened(event.step, screened, now)
        self._trust.suspected(suspects, now)
        self._activation.trained(event.step, self._settings.groups_per_step * self._settings.group_size, now)

    def _version_published(self, event: VersionPublished, now: float) -> None:
        self._nodes.published(max(event.policy_version, self._training.published_version))
        self._training.version_published(event.policy_version, now)


HANDLERS: Final[Mapping[type, Callable[[Coordinator, Any, float], None]]] = {
    NodeConnected: Coordinator._connected,
    NodeDisconnected: Coordinator._disconnected,
    NodeReported: Coordinator._reported,
    GroupPrepared: Coordinator._group_prepared,
    RolloutArrived: lambda core, event, now: core._returns.arrived(event, now),
    RolloutScored: Coordinator._scored,
    RolloutContinued: Coordinator._continued,
    RolloutRejected: Coordinator._rejected,
    SessionDiverged: Coordinator._session_diverged,
    SessionLost: Coordinator._session_lost,
    SlotsChanged: Coordinator._slots_changed,
    RolloutChecked: lambda core, event, now: core._go_on(core._trust.checked(event, now), now),
    NumericsMeasured: lambda core, event, now: core._trust.measured(event),
    CheckReturned: lambda core, event, now: core._go_on(core._trust.returned(event, now), now),
    CheckAbandoned: lambda core, event, now: core._go_on(core._trust.abandoned(event, now), now),
    NodePardoned: lambda core, event, now: core._trust.pardon(event.node_id, now),
    OperatorAsked: Coordinator._operator_asked,
    NodeVouchedFor: lambda core, event, now: core._trust.vouched(event, now),
    LeaseGivenBack: lambda core, event, now: core._returns.given_back(event, now),
    RolloutsBegun: lambda core, event, now: core._ledger.note_begun(event.rollout_ids),
    LearnerReady: lambda core, event, now: core._training.learner_ready(event, now),
    LearnerLost: Coordinator._learner_lost,
    StepComputed: lambda core, event, now: core._training.step_computed(event.step, now),
    StepDone: Coordinator._step_done,
    VersionPublished: Coordinator._version_published,
    VersionUnusable: lambda core, event, now: core._training.version_unusable(event.policy_version, event.reason),
    EvaluationWanted: lambda core, event, now: core._evaluating.begin(event.policy_version),
    EvaluationAbandoned: lambda core, event, now: core._evaluating.abandon(event.policy_version),
    AnswerWanted: lambda core, event, now: core._answering.begin(event.group),
    AnswerCancelled: lambda core, event, now: core._answering.cancel(event.group_id, event.request_id),
    Tick: lambda core, event, now: None,
}
"""Handler of each event type; a test checks that its keys equal `Event`. A Tick only begins a turn, in which all timers
are checked."""
