"""The coordinator: every event in, all effects out. Pure: no I/O, no clock, no chance; `now` is an argument.

Each event changes the state, then the same three questions are asked: can a step be planned, may groups be opened, is
there a node for what wants a lease? A late or repeated event is harmless; an impossible one is a LocalProtocolError.
After an error, or when records could not be committed, this object is ahead of the store: build a new one.

Reading order: settings, events, effects, admission, groups, ledger, fleet, leasing, training, evaluating, and this.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from echo_hub.core import admission
from echo_hub.core.effects import Effect, FinishRun, LookUpReceipt, PrepareGroup, ScoreRollout
from echo_hub.core.evaluating import Evaluating
from echo_hub.core.events import (
    EvaluationAbandoned,
    EvaluationWanted,
    Event,
    GroupPrepared,
    LearnerLost,
    LearnerReady,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
    RolloutContinued,
    RolloutRejected,
    RolloutScored,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.groups import LeasedRollout
from echo_hub.core.leasing import Leasing
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.ready import Fleet
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import HUB_NODE_ID, CoordinatorSettings
from echo_hub.core.snapshot import Snapshot
from echo_hub.core.status import CoordinatorStatus
from echo_hub.core.training import Training
from echo_shared.messages import DropReason, ReceiptState, rollout_id

MAX_SCORER_FAILURES: Final = 3
"""On one turn of an index, each time on another draw; then its group is dropped, so that a problem that breaks the
scorer cannot stall the run."""
MAX_RETURNS: Final = 16
"""Of one index; then its group is dropped, so that a problem that nodes cannot work on cannot stall the run either.
Many more than nodes that come and go give back."""


class Coordinator:
    """`start` once, then `handle` every event. All effects of one call belong together: records first, then actions."""

    def __init__(self, settings: CoordinatorSettings, snapshot: Snapshot) -> None:
        self._settings = settings
        self._out = Outbox()
        self._fleet = Fleet(settings)
        self._ledger = Ledger(group_size=settings.group_size, fleet=self._fleet, out=self._out)
        self._leasing = Leasing(
            settings, ledger=self._ledger, fleet=self._fleet, out=self._out, next_lease_id=snapshot.next_lease_id
        )
        self._training = Training(settings, snapshot, ledger=self._ledger, out=self._out)
        self._evaluating = Evaluating(settings, snapshot, ledger=self._ledger, out=self._out)
        self._snapshot = snapshot
        self._next_to_open = snapshot.next_group_id
        self._next_to_prepare = snapshot.next_group_id
        self._prepared: dict[int, int] = {}
        self._finished = False

    def start(self, now: float) -> list[Effect]:
        """Takes up the snapshot's work; repeats what a crash between commit and action may have lost."""
        leases: defaultdict[tuple[float, int], list[int]] = defaultdict(list)
        for group in self._snapshot.groups:
            self._ledger.restore(group.group_id, group.seed)
        self._evaluating.restore(self._snapshot.rollouts)
        for row in self._snapshot.rollouts:
            rollout = self._ledger.restore_rollout(row)
            if rollout.state is ReceiptState.RECEIVED:
                self._out.act(ScoreRollout(rollout_id=rollout.rollout_id))
            elif rollout.state is ReceiptState.LEASED:
                leases[row.deadline, row.lease_id].append(row.index)
        for failure in self._snapshot.scorer_failures:
            self._ledger.restore_failure(*failure)
        for (deadline, lease_id), indices in leases.items():
            self._leasing.watch(lease_id, tuple(indices), deadline)
        if self._snapshot.planned is not None:
            self._ledger.restore_plan(self._snapshot.planned.group_ids)
        self._give_back_hub_leases()
        self._evaluating.drop_what_settings_lack()
        return self._turn(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """`now`: seconds since the epoch, never going back by much."""
        _HANDLERS[type(event)](self, event, now)
        return self._turn(now)

    @property
    def published_version(self) -> int:
        """The newest; 0 = none but the base."""
        return self._training.published_version

    def status(self) -> CoordinatorStatus:
        """Counts everything anew: O(what is in flight)."""
        states = Counter(rollout.state for rollout in self._ledger.rollouts.values())
        leased = self._fleet.held_by_node
        waiting, complete = len(self._ledger.waiting), len(self._ledger.complete)
        return CoordinatorStatus(
            trained_steps=self._training.trained_steps,
            published_version=self._training.published_version,
            learner_version=self._training.learner_version,
            training_step=self._training.training,
            groups_preparing=self._num_preparing,
            groups_open=waiting - complete,
            groups_buffered=complete,
            groups_planned=len(self._training.planned.group_ids) if self._training.planned else 0,
            nodes_connected=self._fleet.num_connected,
            leases_outstanding=len(
                {r.lease_id for r in self._ledger.rollouts.values() if r.state is ReceiptState.LEASED}
            ),
            rollouts_leased=states[ReceiptState.LEASED],
            rollouts_received=states[ReceiptState.RECEIVED],
            rollouts_scored=states[ReceiptState.SCORED],
            leased_by_node=leased,
            leased_since_start=self._ledger.num_leased,
            trained_since_start=self._ledger.num_trained,
            evaluated_since_start=self._ledger.num_evaluated,
            dropped_since_start=dict(self._ledger.num_dropped),
            finished=self._finished,
        )

    @property
    def _num_preparing(self) -> int:
        return self._next_to_prepare - self._next_to_open

    # --- one turn

    def _turn(self, now: float) -> list[Effect]:
        self._fleet.wake(now)
        self._leasing.dispatch_evaluations(now, within_share=True)
        if not self._finished:
            self._training.advance(now)
            if self._training.finished:
                self._finish()
            else:
                self._admit(now)
        self._leasing.dispatch_evaluations(now, within_share=False)
        return self._out.take()

    def _admit(self, now: float) -> None:
        """Opens what the staleness bound allows, and leases what is open."""
        version = self._lease_version()
        if version is None:
            return
        outlook = self._training.outlook
        allowed = admission.room(
            self._settings,
            outlook,
            lease_version=version,
            waiting_groups=len(self._ledger.waiting) + self._num_preparing,
        )
        for group_id in range(self._next_to_prepare, self._next_to_prepare + allowed):
            self._out.act(PrepareGroup(group_id=group_id))
        self._next_to_prepare += allowed
        self._leasing.dispatch(now, newest_version=version, outlook=outlook)

    def _lease_version(self) -> int | None:
        """The newest version that a lease may name; None while nothing may be leased."""
        if self._settings.mode == "colocated":
            return self._training.idle_version
        return self._training.published_version

    def _finish(self) -> None:
        """Groups are left over where steps take a varying number of them, or where the run's steps were lowered."""
        self._finished = True
        for group in list(self._ledger.groups.values()):
            if group.pinned_version is None:
                self._ledger.drop_group(group, DropReason.RUN_ENDED)
        self._evaluating.drop_all_but_begun()
        self._out.act(FinishRun())

    # --- nodes

    def _connected(self, event: NodeConnected, now: float) -> None:
        self._fleet.connect(event.node_id)

    def _disconnected(self, event: NodeDisconnected, now: float) -> None:
        self._fleet.disconnect(event.node_id)

    def _reported(self, event: NodeReported, now: float) -> None:
        self._fleet.report(event.node_id, event.capacity, event.policy_version)

    def _tick(self, event: Tick, now: float) -> None:
        self._leasing.expire(now)

    def _arrived(self, event: RolloutArrived, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.node_id != event.node_id:
            self._out.act(LookUpReceipt(node_id=event.node_id, rollout_id=event.rollout_id))
        elif rollout.state is not ReceiptState.LEASED:
            self._out.receipt(rollout.node_id, rollout.rollout_id, rollout.state)
        elif problem := _unlike_lease(event, rollout):
            self._fail(rollout, DropReason.INVALID, problem)
            self._fleet.fail(event.node_id, now)
        elif self._ledger.groups[rollout.group_id].slots[rollout.index].is_won:
            self._ledger.drop([rollout], DropReason.DUPLICATE)
        else:
            self._ledger.receive(rollout, event.payload, now)

    def _given_back(self, event: LeaseGivenBack, now: float) -> None:
        returned = [self._ledger.rollouts.get(rollout_id(event.lease_id, index)) for index in event.indices]
        for rollout in returned:
            if rollout and rollout.node_id == event.node_id and rollout.state is ReceiptState.LEASED:
                self._return(rollout, event.reason)
        self._fleet.fail(event.node_id, now)

    def _return(self, rollout: LeasedRollout, why: str) -> None:
        group = self._ledger.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        self._fail(rollout, DropReason.RETURNED, why)
        slot.num_returns += 1
        if slot.num_returns >= MAX_RETURNS and group.pinned_version is None:
            self._ledger.drop_group(group, DropReason.RETURNED)

    def _fail(self, rollout: LeasedRollout, reason: DropReason, detail: str) -> None:
        self._ledger.blame(rollout)
        self._ledger.drop([rollout], reason, detail)

    # --- groups and scores

    def _group_prepared(self, event: GroupPrepared, now: float) -> None:
        """Groups are opened in order, whatever order they are prepared in: so a restart knows which one is next."""
        if not self._next_to_open <= event.group_id < self._next_to_prepare or self._finished:
            return
        self._prepared[event.group_id] = event.seed
        while (seed := self._prepared.pop(self._next_to_open, None)) is not None:
            self._ledger.open_group(self._next_to_open, seed)
            self._next_to_open += 1

    def _scored(self, event: RolloutScored, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.state is not ReceiptState.RECEIVED:
            return
        if self._ledger.groups[rollout.group_id].pinned_version is not None:
            self._evaluating.end_episode(rollout, event.reward)
        else:
            self._ledger.score(rollout, event.reward)

    def _continued(self, event: RolloutContinued, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is not None and rollout.state is ReceiptState.RECEIVED:
            self._ledger.go_on(rollout, event.observation_ids)

    def _rejected(self, event: RolloutRejected, now: float) -> None:
        rollout = self._ledger.rollouts.get(event.rollout_id)
        if rollout is None or rollout.state is not ReceiptState.RECEIVED:
            return
        group = self._ledger.groups[rollout.group_id]
        if event.killed_scorer:
            self._fleet.kill_scorer(rollout.node_id, group.group_id, now)
        if event.reason is not DropReason.SCORER_FAILED:
            self._fail(rollout, event.reason, event.detail)
            if event.reason is DropReason.INVALID:
                self._fleet.fail(rollout.node_id, now)
        elif group.pinned_version is not None:
            self._evaluating.end_episode(rollout, None)
        else:
            self._ledger.draw_again(rollout, event.detail)
            if group.slots[rollout.index].scorer_failures >= MAX_SCORER_FAILURES:
                self._ledger.drop_group(group, DropReason.SCORER_FAILED)

    # --- learner

    def _learner_ready(self, event: LearnerReady, now: float) -> None:
        self._training.learner_ready(event.policy_version, event.metrics, now)

    def _learner_lost(self, event: LearnerLost, now: float) -> None:
        self._training.learner_lost()
        self._give_back_hub_leases()

    def _give_back_hub_leases(self) -> None:
        """What the learner was sampling is gone with its process."""
        lost = [
            rollout
            for rollout in self._ledger.rollouts.values()
            if rollout.node_id == HUB_NODE_ID and rollout.state is ReceiptState.LEASED
        ]
        self._ledger.drop(lost, DropReason.RETURNED, "the learner stopped")

    def _step_done(self, event: StepDone, now: float) -> None:
        self._training.step_done(event.step, event.metrics, now)

    def _version_published(self, event: VersionPublished, now: float) -> None:
        self._training.version_published(event.policy_version, now)

    # --- evaluations

    def _evaluation_wanted(self, event: EvaluationWanted, now: float) -> None:
        self._evaluating.begin(event.policy_version)

    def _evaluation_abandoned(self, event: EvaluationAbandoned, now: float) -> None:
        self._evaluating.abandon(event.policy_version)


def _unlike_lease(event: RolloutArrived, rollout: LeasedRollout) -> str:
    """What in the node's result contradicts its lease; empty = nothing."""
    said: Mapping[str, tuple[int, int]] = {
        "lease": (event.lease_id, rollout.lease_id),
        "group": (event.group_id, rollout.group_id),
        "index": (event.index, rollout.index),
        "first policy version": (event.policy_version_start, rollout.policy_version),
        "last policy version": (event.policy_version_end, rollout.policy_version),
    }
    wrong = [f"{name} {got} instead of {leased}" for name, (got, leased) in said.items() if got != leased]
    return ", ".join(wrong)


_HANDLERS: Final[Mapping[type, Callable[[Coordinator, Any, float], None]]] = {
    NodeConnected: Coordinator._connected,
    NodeDisconnected: Coordinator._disconnected,
    NodeReported: Coordinator._reported,
    GroupPrepared: Coordinator._group_prepared,
    RolloutArrived: Coordinator._arrived,
    RolloutScored: Coordinator._scored,
    RolloutContinued: Coordinator._continued,
    RolloutRejected: Coordinator._rejected,
    LeaseGivenBack: Coordinator._given_back,
    LearnerReady: Coordinator._learner_ready,
    LearnerLost: Coordinator._learner_lost,
    StepDone: Coordinator._step_done,
    VersionPublished: Coordinator._version_published,
    EvaluationWanted: Coordinator._evaluation_wanted,
    EvaluationAbandoned: Coordinator._evaluation_abandoned,
    Tick: Coordinator._tick,
}
