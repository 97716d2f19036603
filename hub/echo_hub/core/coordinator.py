"""The coordinator: takes every event and returns all effects. It is pure: no I/O, no clock, no randomness.

A *turn* is one call with one or several events. Each event changes the state. Then the turn asks three questions,
whatever the event was. Can a step be planned? May groups be opened? Is there a node for the work that wants a lease? A
late or repeated event is harmless. An impossible event raises LocalProtocolError. After an error or a failed commit,
discard this object, which is ahead of the store, and build a new one.

Reading order: settings, events, effects, groups, ledger, nodes, policy, training, evaluating, activation, trust,
coordinator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

from echo_hub.core.accounting.effects import Effect, FinishRun, LookUpReceipt, ScoreRollout, TellOperator
from echo_hub.core.accounting.events import (
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
    StepComputed,
    StepDone,
    Tick,
    VersionPublished,
    VersionUnusable,
)
from echo_hub.core.accounting.groups import GroupOwner, LeasedRollout, unlike_lease
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.restoring import restore_failure, restore_rollout
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.activation.activation import Activation
from echo_hub.core.activation.choice import Demand
from echo_hub.core.evaluating import Evaluating
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.operating import OVER, PAUSED, answer
from echo_hub.core.policy import sizing
from echo_hub.core.policy.admitting import Admitting
from echo_hub.core.policy.leasing import Leasing
from echo_hub.core.policy.outstanding import OutstandingLeases
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.status import CoordinatorStatus
from echo_hub.core.training import Training
from echo_hub.core.trust.trust import Trust
from echo_hub.core.trust.under_check import Held
from echo_shared.wire.messages import Checked, DropReason, ReceiptState, rollout_id

MAX_RETURNS: Final = 16
"""Number of times that nodes give back one rollout index of a group before the group's owner is told. The owner may
then replace the group, so that a problem that no node can solve does not stall the run. Nodes that connect and
disconnect return an index far less often."""


class Coordinator:
    """State machine of a run. Call `start` once, then `handle` for every event. Commit the records of each call before
    its actions."""

    def __init__(self, settings: CoordinatorSettings, snapshot: CoordinatorSnapshot) -> None:
        self._settings = settings
        self._out = Outbox()
        self._nodes = Nodes(settings.nodes)
        self._ledger = Ledger(nodes=self._nodes, out=self._out, discount=settings.discount)
        self._training = Training(settings, snapshot, ledger=self._ledger, out=self._out)
        self._evaluating = Evaluating(settings, snapshot, ledger=self._ledger, out=self._out)
        self._owners: tuple[GroupOwner, ...] = (self._training, self._evaluating)
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
            out=self._out,
            next_group_id=snapshot.next_group_id,
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
        self._training.restore(self._snapshot.groups)
        self._evaluating.restore(self._snapshot.rollouts)
        for row in self._snapshot.rollouts:
            rollout = restore_rollout(self._ledger, row, now)
            if rollout.state is ReceiptState.LEASED:
                leases[row.deadline, row.lease_id].append(row.index)
                continue
            if rollout.state is ReceiptState.RECEIVED:
                self._out.act(ScoreRollout(rollout_id=rollout.rollout_id))
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
        """Handle several events in one turn: plan steps and lease work once, after all of them."""
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
        leases = self._evaluating.wanting and self._settings.leasing != "paused"
        if leases:
            self._leasing.dispatch_beside(now, within_share=True)
        if not self._finished and self._num_changes != self._stood:
            self._training.advance(now)
            if self._training.finished:
                self._finish(now)
            else:
                self._admit(now)
            self._stood = self._num_changes
        if leases:
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
        self._nodes.connect(event.node_id, event.cost_per_hour, origin=event.invite or event.origin)
        self._activation.connected(event.node_id, now)
        self._outstanding.came(event.node_id)
        self._trust.connected(event.node_id, event.numerics, now, kin=(event.origin, event.invite, event.owner))

    def _disconnected(self, event: NodeDisconnected, now: float) -> None:
        self._activation.disconnected(event.node_id, self._demand, now)
        self._nodes.disconnect(event.node_id)
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

    def _arrived(self, event: RolloutArrived, now: float) -> None:
        newest = self.published_version if self._settings.interrupts else None
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
            self._ledger.receive(rollout, event.payload, now, oldest_version=event.policy_version_start)
            self._trust.received(rollout)
            if (node := self._nodes.get(event.node_id)) is not None:
                self._training.drew(event.policy_version_end, node)

    def _oldest_useful(self, rollout: LeasedRollout) -> int:
        """Return the oldest version whose tokens this rollout may contain, so that the next step can still train on it;
        0 for evaluations."""
        for_learner = self._ledger.groups[rollout.group_id].owner.for_learner
        return sizing.oldest_useful_version(self._settings, self._training.next_step) if for_learner else 0

    def _given_back(self, event: LeaseGivenBack, now: float) -> None:
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
        newest = self.published_version if self._settings.interrupts else rollout.policy_version
        may_be = rollout.policy_version <= version <= newest
        return self._training.refused(version, node) if may_be else ()

    def _return(self, rollout: LeasedRollout, why: str, *, is_excused: bool) -> None:
        group = self._ledger.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        self._ledger.fail(rollout, DropReason.RETURNED, why)
        slot.num_returns += not is_excused
        if slot.num_returns >= MAX_RETURNS:
            group.owner.returned_too_often(group)

    # --- groups and scores

    def _group_prepared(self, event: GroupPrepared, now: float) -> None:
        if not self._finished:
            self._admitting.prepared(event)

    def _scored(self, event: RolloutScored, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.state is ReceiptState.RECEIVED and not self._trust.holds(event):
            self._ledger.note_scoring(rollout, now)
            rollout.components = event.components
            group = self._ledger.groups[rollout.group_id]
            turns = [turn.rollout_id for turn in group.slots[rollout.index].received]
            group.owner.end_episode(rollout, event.reward)
            self._trust.scored(turns, event.reward, now)

    def _continued(self, event: RolloutContinued, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.state is ReceiptState.RECEIVED and not self._trust.holds(event):
            self._ledger.go_on(rollout, event.observation_ids, turn_reward=event.turn_reward)

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

    # --- trust

    def _go_on(self, held: Held | None, now: float) -> None:
        """Process the scorer's answer that was held back while the rollout was checked. `held` None: no answer was held
        back."""
        if isinstance(held, RolloutScored):
            self._scored(held, now)
        elif held is not None:
            self._continued(held, now)

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
    RolloutArrived: Coordinator._arrived,
    RolloutScored: Coordinator._scored,
    RolloutContinued: Coordinator._continued,
    RolloutRejected: Coordinator._rejected,
    RolloutChecked: lambda core, event, now: core._go_on(core._trust.checked(event, now), now),
    NumericsMeasured: lambda core, event, now: core._trust.measured(event),
    CheckReturned: lambda core, event, now: core._go_on(core._trust.returned(event, now), now),
    CheckAbandoned: lambda core, event, now: core._go_on(core._trust.abandoned(event), now),
    NodePardoned: lambda core, event, now: core._trust.pardon(event.node_id, now),
    OperatorAsked: Coordinator._operator_asked,
    NodeVouchedFor: lambda core, event, now: core._trust.vouched(event, now),
    LeaseGivenBack: Coordinator._given_back,
    RolloutsBegun: lambda core, event, now: core._ledger.note_begun(event.rollout_ids),
    LearnerReady: lambda core, event, now: core._training.learner_ready(event, now),
    LearnerLost: Coordinator._learner_lost,
    StepComputed: lambda core, event, now: core._training.step_computed(event.step, now),
    StepDone: Coordinator._step_done,
    VersionPublished: Coordinator._version_published,
    VersionUnusable: lambda core, event, now: core._training.version_unusable(event.policy_version, event.reason),
    EvaluationWanted: lambda core, event, now: core._evaluating.begin(event.policy_version),
    EvaluationAbandoned: lambda core, event, now: core._evaluating.abandon(event.policy_version),
    Tick: lambda core, event, now: None,
}
"""Handler of each event type; a test checks that its keys equal `Event`. A Tick only begins a turn, in which all timers
are checked."""
