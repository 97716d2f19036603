"""The group ledger: every group and rollout that is not final, and every change of a rollout's state.

Invariants, after every call:
- a leased rollout is in this ledger until it is final, and then never again: leased = trained + evaluated + dropped +
  in flight;
- each change of state is recorded and receipted exactly once, here and nowhere else;
- each turn of an index has at most one winner, and what is leased of an index is its turn in progress;
- a group that is complete has nothing leased;
- what a slot has as begun is of its turn in progress and of the seed that this turn is drawn with;
- `wants` is told of every change of a slot, and so what wants a lease is known;
- `flat` holds exactly those complete groups that wait and whose rewards are all equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.admission import SortedIds
from echo_hub.core.effects import (
    FirstTurn,
    GroupDropped,
    GroupOpened,
    HandOver,
    RevokeLease,
    RolloutReceived,
    RolloutsDropped,
    RolloutsEvaluated,
    RolloutsLeased,
    ScoreRecorded,
    ScoreRollout,
    SendTrained,
    StepPlanned,
    StepTrained,
)
from echo_hub.core.groups import LeasedRollout, RolloutGroup, Slot, oldest_of
from echo_hub.core.lengths import Lengths
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.outbox import Outbox
from echo_hub.core.snapshot import StepRow
from echo_hub.core.wants import Wants
from echo_shared.books import TaskFigures
from echo_shared.messages import DropReason, ReceiptState, rollout_id
from echo_shared.rollout_books import RolloutPayload

NO_TASKS: Final[Mapping[str, TaskFigures]] = MappingProxyType({})

SCORINGS: Final = 32
"""Over so many the time that scoring takes is averaged."""
CLEARED_AT_ONCE: Final = 16
"""Groups whose memory is given back in one turn."""


class Ledger:
    """Groups for the learner are *waiting* (open or complete) until a step plans them; no other ever is. `rollouts`
    holds all that are not final."""

    def __init__(self, *, nodes: Nodes, out: Outbox, discount: float | None = None) -> None:
        """`discount`: of the returns from each turn on, by which turns have advantages; None: whole episodes have."""
        self._nodes = nodes
        self._discount = discount
        self._out = out
        self._held_by: dict[str, dict[str, LeasedRollout]] = {}
        self._by_version: dict[int, set[int]] = {}
        """The learner's groups of which something was leased or drawn by each version."""
        self.lengths = Lengths()
        self.scoring_s = 0.0
        """Seconds from a rollout's arrival to its reward, on average of late."""
        self.num_under_way = 0
        """Rollouts that nodes hold and that are neither late nor overdue."""
        self.num_queue_changes = 0
        """Grows whenever a group joins or leaves a queue of the learner's."""
        self.wants = Wants()
        self._episodes_go_on = False
        """An episode of the task has had several turns: which is its last, only its reward says."""
        self._gone: deque[RolloutGroup] = deque()
        """Trained, and to be forgotten."""
        self.groups: dict[int, RolloutGroup] = {}
        self.rollouts: dict[str, LeasedRollout] = {}
        self.waiting = SortedIds()
        self.complete = SortedIds()
        self.flat = SortedIds()

    def add_group(self, group: RolloutGroup) -> None:
        """A group from before a restart, whose rollouts follow; a new one is opened."""
        self.groups[group.group_id] = group
        if group.owner.for_learner:
            self.waiting.add(group.group_id)
            self.num_queue_changes += 1
        if group.asked_for:
            self.wants.note_all(group)

    def take_from_queues(self, group_ids: Collection[int]) -> None:
        """These groups are a step's."""
        for ids in (self.waiting, self.complete, self.flat):
            ids.discard_all(group_ids)
        self.num_queue_changes += 1

    def open_group(self, group: RolloutGroup) -> None:
        """A new group, not all of whose episodes are evaluated already."""
        self.add_group(group)
        if group.owner.for_learner:
            self._out.record(GroupOpened(group_id=group.group_id, seed=group.seed, prompt=group.prompt))

    def ask_for(self, group: RolloutGroup) -> None:
        """What the group wants is leased from here on."""
        group.asked_for = True
        self.wants.note_all(group)

    def lease(self, record: RolloutsLeased, now: float, goes_on: Iterable[tuple[int, int]] = ()) -> list[LeasedRollout]:
        """Books the lease; the caller sends it. `goes_on`: as `begun` says."""
        continued = {index for index, _ in goes_on}
        group = self.groups[record.group_id]
        leased: list[LeasedRollout] = []
        expected = self.expected_tokens(group)
        for index in record.indices:
            slot = group.slots[index]
            before = slot.begun if index in continued else None
            rollout = LeasedRollout(
                rollout_id(record.lease_id, index),
                record.lease_id,
                record.node_id,
                record.group_id,
                index,
                record.policy_version,
                record.turn,
                deadline=record.deadline,
                leased_at=now,
                expected_tokens=expected,
                oldest_version=record.policy_version if before is None else before.oldest_version,
                drawn_by=() if before is None else tuple(name for name in before.drawers if name != record.node_id),
                is_begun=before is not None and before.is_begun,
            )
            self._add_lease(rollout)
            self.wants.settle(group, index)
            leased.append(rollout)
        self._nodes.take(record.node_id, len(leased), len(leased) * expected, now)
        self._out.record(record)
        return leased

    def begun(self, record: RolloutsLeased, *, oldest: int | None = None) -> tuple[tuple[int, int], ...]:
        """The indices that go on with what an earlier lease of theirs has drawn, each with that lease; before `lease`.

        Only with what a proven node drew, or the same: who goes on answers for the whole completion, and is not to
        answer for what a fresh key has planted. And with what the same version drew, or, with `oldest`, older ones that
        are not older than this.
        """
        slots = self.groups[record.group_id].slots
        return tuple(
            (index, before.lease_id)
            for index in record.indices
            if (before := slots[index].begun) is not None
            and (
                before.policy_version == record.policy_version
                if oldest is None
                else before.policy_version <= record.policy_version and before.oldest_version >= oldest
            )
            and (before.node_id == record.node_id or self._nodes.is_proven(before.node_id))
            and not (before.drawn_by and any(self._nodes.is_quarantined(drawer) for drawer in before.drawn_by))
        )

    def expected_tokens(self, group: RolloutGroup) -> float:
        """What a completion of the group is likely to come to; 0 while nobody knows."""
        return group.expected_tokens or self.lengths.mean_tokens

    def held_by(self, node_id: str) -> list[LeasedRollout]:
        """What the node holds, in the order in which it was leased."""
        return list(self._held_by.get(node_id, {}).values())

    def note_begun(self, rollout_ids: Iterable[str]) -> None:
        """The hub has drawn tokens of these. Those that are final by now are left out."""
        for begun_id in rollout_ids:
            if (rollout := self.rollouts.get(begun_id)) is not None:
                rollout.is_begun = True

    def expire(self, rollout: LeasedRollout, now: float) -> None:
        """Its deadline has passed: the index is leased again, and a late result may still win."""
        self.num_under_way -= not rollout.late
        rollout.overdue = True
        self._nodes.expire(rollout.node_id, now, was_late=rollout.late)
        self.blame(rollout)
        self._begin_if_newer(rollout)
        self.wants.note(self.groups[rollout.group_id], rollout.index)

    def mark_late(self, rollout: LeasedRollout, now: float, *, is_slow: bool) -> None:
        """Its node takes too long (`is_slow`), or has left: another may draw it too, and the first valid result
        wins."""
        self.num_under_way -= 1
        if is_slow:
            self.note_missing(rollout, now)
        self._nodes.mark_late(rollout.node_id, now)
        rollout.late = True
        self.blame(rollout)
        self._begin_if_newer(rollout)
        self.wants.note(self.groups[rollout.group_id], rollout.index)

    def note_missing(self, rollout: LeasedRollout, now: float) -> None:
        """It has not come in, and is late or wanted no more. What is still missing may be as long as any: that its
        prompt's completions are short on average says nothing of its node."""
        num_tokens = max(rollout.expected_tokens, self.lengths.long_tokens)
        self._nodes.miss(rollout.node_id, num_tokens, now - rollout.leased_at)

    def blame(self, rollout: LeasedRollout) -> None:
        """Others than its node are asked first when the index is leased again."""
        group = self.groups[rollout.group_id]
        group.is_plain = False
        group.slots[rollout.index].blame(rollout.node_id)

    def fail(self, rollout: LeasedRollout, reason: DropReason, detail: str) -> None:
        """Any state → dropped, and others than its node are asked first. What was given back may be gone on with; what
        has failed is drawn anew."""
        if reason is not DropReason.RETURNED:
            self.groups[rollout.group_id].slots[rollout.index].begun = None
        self.blame(rollout)
        self.drop([rollout], reason, detail)

    def receive(
        self, rollout: LeasedRollout, payload: RolloutPayload, now: float, *, oldest_version: int | None = None
    ) -> None:
        """leased → received: it wins its index's turn, which must have no winner yet. `oldest_version`: of its first
        token; None: its lease's."""
        group = self.groups[rollout.group_id]
        rollout.num_tokens, rollout.received_at = len(payload.completion_ids), now
        rollout.oldest_version = rollout.policy_version if oldest_version is None else oldest_version
        self.note_version(group, rollout.oldest_version)
        drawn, rollout.drawn_by = rollout.num_tokens, ()
        if payload.spans:
            drawn = sum(span.num_tokens for span in payload.spans if span.node_id == rollout.node_id)
            drawers = dict.fromkeys(span.node_id for span in payload.spans)
            rollout.drawn_by = tuple(drawer for drawer in drawers if drawer != rollout.node_id)
        self._nodes.measure(
            rollout.node_id,
            drawn,
            sampling_s=payload.sampling_s,
            latency_s=now - rollout.leased_at,
            now=now,
        )
        self.lengths.seen(group.prompt, rollout.num_tokens)
        self._end_lease(rollout)
        group.num_tokens += rollout.num_tokens
        group.slots[rollout.index].winner = rollout
        group.note_age(rollout)
        self.wants.settle(group, rollout.index)
        self._out.record(RolloutReceived(rollout_id=rollout.rollout_id, received_at=now, payload=payload))
        self._move(rollout, ReceiptState.RECEIVED)
        first = None if rollout.turn else FirstTurn(group.group_id, payload)
        rollout.payload = payload if first and group.owner.for_learner else None
        self._out.act(ScoreRollout(rollout_id=rollout.rollout_id, first_turn=first))
        if not self._episodes_go_on and group.has_come_in:
            self._hand_over(group)

    def score(self, rollout: LeasedRollout, reward: float) -> None:
        """received → scored, and its episode has ended. The last one completes its group, which is then wanted from
        nobody any more."""
        self._record_score(rollout, reward)
        rollout.reward = reward
        self._nodes.trust(rollout.node_id, in_time=not rollout.overdue)
        group = self.groups[rollout.group_id]
        group.num_ended += 1
        self.note_complete(group)
        if group.complete:
            self.revoke(group.still_leased, DropReason.EXPIRED)
            if self._episodes_go_on:
                self._hand_over(group)

    def _record_score(self, rollout: LeasedRollout, reward: float | None) -> None:
        self._out.record(ScoreRecorded(rollout_id=rollout.rollout_id, reward=reward, components=rollout.components))
        rollout.components = None
        self._move(rollout, ReceiptState.SCORED)

    def note_scoring(self, rollout: LeasedRollout, now: float) -> None:
        """The rollout's reward has come."""
        if rollout.received_at is not None:
            self.scoring_s += (now - rollout.received_at - self.scoring_s) / SCORINGS

    def evaluate(self, rollout: LeasedRollout, reward: float | None) -> None:
        """received → scored → evaluated, with the turns before it: an episode of an evaluation has ended."""
        self._record_score(rollout, reward)
        if reward is not None:
            self._nodes.trust(rollout.node_id, in_time=not rollout.overdue)
        group = self.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        if slot.turns:  # They can be read no more: nobody can be sent such a lease again.
            self.revoke(slot.leased, DropReason.EXPIRED)
        turns = slot.received
        self._out.record(RolloutsEvaluated(rollout_ids=tuple(turn.rollout_id for turn in turns)))
        for turn in turns:
            self._move(self.rollouts.pop(turn.rollout_id), ReceiptState.EVALUATED)
        slot.turns, slot.winner, slot.evaluated, slot.begun = (), None, True, None
        group.num_ended += 1
        if group.complete:
            self.revoke(group.still_leased, DropReason.EXPIRED)
            self._forget(group.group_id)

    def go_on(self, rollout: LeasedRollout, observation_ids: NDArray[np.int32], *, turn_reward: float = 0.0) -> None:
        """received → scored, and the environment has answered: the episode's next turn wants a lease."""
        self._out.record(
            ScoreRecorded(
                rollout_id=rollout.rollout_id, reward=None, observation_ids=observation_ids, turn_reward=turn_reward
            )
        )
        rollout.turn_reward, rollout.payload = turn_reward, None
        self._move(rollout, ReceiptState.SCORED)
        self._nodes.trust(rollout.node_id, in_time=not rollout.overdue)
        group = self.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        self.revoke(slot.leased, DropReason.EXPIRED)
        group.is_plain, self._episodes_go_on = False, True
        slot.turns, slot.winner = (*slot.turns, rollout), None
        slot.failed_on, slot.num_returns, slot.begun = (), 0, None
        self.wants.note(group, rollout.index)

    def draw_again(self, rollout: LeasedRollout, detail: str) -> None:
        """received → dropped: the scorer failed on it. Its turn wants a lease with another seed; whoever still draws it
        with the one before would give the same completion."""
        slot = self.groups[rollout.group_id].slots[rollout.index]
        self.revoke(slot.leased, DropReason.EXPIRED)
        slot.failed_draws += (slot.turn,)
        self.fail(rollout, DropReason.SCORER_FAILED, detail)

    def draw_newer(self, group: RolloutGroup, oldest_version: int) -> None:
        """received → dropped: every episode of which an older version than this has drawn anything. Each wants a lease
        again, from its first turn on, and is now known to become as long as it was."""
        group.num_redraws += 1
        for slot in group.slots:
            drawn = slot.received
            if any(rollout.oldest_version < oldest_version for rollout in drawn):
                if slot.turns:  # What is leased goes on with them.
                    self.revoke(slot.leased, DropReason.STALE)
                group.expected_tokens = max(group.expected_tokens, *(rollout.num_tokens for rollout in drawn))
                self.drop(drawn, DropReason.STALE)
                slot.begun = None

    def drop(self, rollouts: Iterable[LeasedRollout], reason: DropReason, detail: str = "") -> None:
        """Any state → dropped. An index that loses its last rollout wants a lease again."""
        dropped = tuple(rollouts)
        if not dropped:
            return
        ids = tuple(rollout.rollout_id for rollout in dropped)
        self._out.record(RolloutsDropped(rollout_ids=ids, reason=reason, detail=detail))
        for rollout in dropped:
            del self.rollouts[rollout.rollout_id]
            group = self.groups[rollout.group_id]
            if rollout.state is ReceiptState.LEASED:
                self._end_lease(rollout)
            else:
                self._take_out(group, rollout)
            group.oldest_leased = oldest_of(group.received + group.still_leased)
            self.wants.note(group, rollout.index)
            self._move(rollout, ReceiptState.DROPPED, reason)

    def _take_out(self, group: RolloutGroup, rollout: LeasedRollout) -> None:
        was_complete = group.complete
        group.take_out(rollout)
        if was_complete and not group.complete:
            self.complete.discard(group.group_id)
            self.flat.discard(group.group_id)
            self.num_queue_changes += 1

    def revoke(self, rollouts: Iterable[LeasedRollout], reason: DropReason) -> None:
        """Drops rollouts that are still leased, and tells their nodes to stop, unless others of the lease are wanted: a
        node stops all of it."""
        revoked = sorted(rollouts, key=lambda rollout: rollout.lease_id)
        self.drop(revoked, reason)
        for lease_id, of_lease in groupby(revoked, key=lambda rollout: rollout.lease_id):
            one = next(of_lease)
            if all(other.lease_id != lease_id for other in self.groups[one.group_id].still_leased):
                self._out.act(RevokeLease(node_id=one.node_id, lease_id=lease_id, reason=reason))

    def drop_group(self, group: RolloutGroup, reason: DropReason) -> None:
        """The whole group, whatever state it is in, and with it what nodes still hold of it."""
        self.drop(group.received, reason)
        self.revoke(group.still_leased, reason)
        self._forget(group.group_id)
        if group.owner.for_learner:
            self._out.record(GroupDropped(group_id=group.group_id, reason=reason))

    def plan(
        self, step: int, group_ids: tuple[int, ...], now: float, *, by_task: Mapping[str, TaskFigures] = NO_TASKS
    ) -> StepRow:
        """Writes down the batch of `step`; its groups, all complete, leave the queue."""
        groups = [self.groups[group_id] for group_id in group_ids]
        ids = tuple([rollout_id for group in groups for rollout_id in group.received_ids])
        ages = tuple([step - 1 - (group.oldest_version or 0) for group in groups])
        self._out.record(
            StepPlanned(
                step=step, group_ids=group_ids, rollout_ids=ids, staleness=ages, planned_at=now, by_task=by_task
            )
        )
        self.take_from_queues(group_ids)
        return StepRow(step=step, group_ids=group_ids, rollout_ids=ids)

    def train(
        self, batch: StepRow, metrics: Mapping[str, float], now: float, *, left_out: Collection[int] = ()
    ) -> None:
        """scored → trained, for the whole batch; but scored → dropped for the groups that are `left_out` of it."""
        ids = batch.rollout_ids
        if left_out:
            ids = tuple([trained_id for trained_id in ids if self.rollouts[trained_id].group_id not in left_out])
        trained = [self.rollouts.pop(trained_id) for trained_id in ids]
        node_ids = tuple([rollout.node_id for rollout in trained])
        self._out.record(
            StepTrained(
                step=batch.step,
                rollout_ids=ids,
                metrics=metrics,
                trained_at=now,
                node_ids=node_ids,
                drawn_by_several=tuple([rollout.rollout_id for rollout in trained if rollout.drawn_by]),
            )
        )
        if ids:
            self._out.act(SendTrained(rollout_ids=ids, node_ids=node_ids))
        for group_id in batch.group_ids:
            if group_id in left_out:
                self.drop_group(self.groups[group_id], DropReason.SCREENED)
            else:
                self._gone.append(self.groups.pop(group_id))

    def clear_away(self) -> None:
        """Lets go of some of what is trained: all of a large step's at once would hold everybody up."""
        gone = self._gone
        if gone:
            for _ in range(min(CLEARED_AT_ONCE, len(gone))):
                gone.popleft()

    def waiting_from_before(self, oldest_version: int) -> list[RolloutGroup]:
        """The waiting groups of which something was leased or drawn by a version older than this, by their ids; each is
        told once for each such version."""
        found: set[int] = set()
        for version in [version for version in self._by_version if version < oldest_version]:
            found |= self._by_version.pop(version)
        return [self.groups[group_id] for group_id in sorted(found) if group_id in self.waiting]

    def _hand_over(self, group: RolloutGroup) -> None:
        if group.owner.for_learner:
            ids = tuple(group.received_ids)
            self._out.act(HandOver(group_id=group.group_id, rollout_ids=ids, first_turns=group.take_first_turns()))

    def _begin(self, slot: Slot, rollout: LeasedRollout) -> None:
        """Remembers it as what another may go on with."""
        before = slot.begun
        if (
            before is None
            or before.policy_version != rollout.policy_version
            or self._nodes.is_proven(rollout.node_id)
            or not self._nodes.is_proven(before.node_id)
        ):
            slot.begun = rollout

    def _begin_if_newer(self, rollout: LeasedRollout) -> None:
        """Its node may have proven itself since it was leased: then what it has added is gone on with too."""
        slot = self.groups[rollout.group_id].slots[rollout.index]
        if slot.begun is not None and slot.begun.lease_id < rollout.lease_id:
            self._begin(slot, rollout)

    def _forget(self, group_id: int) -> None:
        group = self.groups.pop(group_id)
        self.num_queue_changes += 1
        for ids in (self.waiting, self.complete, self.flat):
            ids.discard(group_id)
        group.owner.wanting.discard(group_id)

    def note_complete(self, group: RolloutGroup) -> None:
        """It may have become complete."""
        if group.complete and group.owner.for_learner:
            self.complete.add(group.group_id)
            self.num_queue_changes += 1
            if not group.has_advantage(discount=self._discount):
                self.flat.add(group.group_id)

    def note_version(self, group: RolloutGroup, policy_version: int) -> None:
        """Something of the group is leased to be drawn, or has been drawn, by this version."""
        if group.oldest_leased is None or policy_version < group.oldest_leased:
            group.oldest_leased = policy_version
        if group.owner.for_learner:
            self._by_version.setdefault(policy_version, set()).add(group.group_id)

    def _end_lease(self, rollout: LeasedRollout) -> None:
        slot = self.groups[rollout.group_id].slots[rollout.index]
        slot.leased = tuple([other for other in slot.leased if other is not rollout]) if len(slot.leased) > 1 else ()
        self.num_under_way -= not (rollout.late or rollout.overdue)
        held = self._held_by[rollout.node_id]
        del held[rollout.rollout_id]
        if not held:
            del self._held_by[rollout.node_id]
        overdue, late = rollout.overdue, rollout.late
        self._nodes.release(rollout.node_id, rollout.expected_tokens, overdue=overdue, late=late)

    def hold(self, rollout: LeasedRollout, now: float) -> None:
        """Its node has been given it before."""
        self._add_lease(rollout)
        self._nodes.take(rollout.node_id, 1, 0.0, now)

    def _add_lease(self, rollout: LeasedRollout) -> None:
        group = self.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        self.note_version(group, rollout.oldest_version)
        self.rollouts[rollout.rollout_id] = rollout
        slot.leased = (*slot.leased, rollout)
        self._begin(slot, rollout)
        self.num_under_way += 1
        self._held_by.setdefault(rollout.node_id, {})[rollout.rollout_id] = rollout

    def _move(self, rollout: LeasedRollout, state: ReceiptState, reason: DropReason | None = None) -> None:
        rollout.state = state
        self._out.receipt(rollout.node_id, rollout.rollout_id, state, reason)
