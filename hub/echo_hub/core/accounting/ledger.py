"""The group ledger: every unfinished group and rollout, and every change of a rollout's state.

Invariants, after every call:
- a leased rollout stays in this ledger until it is trained, evaluated, answered or dropped, and never comes back:
  leased = trained + evaluated + answered + dropped + in flight;
- each change of state is recorded and receipted exactly once, only in this module;
- each turn of an index has at most one winner; an index has leases only for its current turn;
- a complete group has no leases;
- the `begun` rollout of a slot belongs to the slot's current turn and current seed;
- `wants` is told of every change of a slot, so the set of indices that want a lease is always known;
- `flat` holds exactly the complete waiting groups that have no advantage, because their rewards are all equal;
- whenever a received rollout of an episode with a session is dropped, or the episode ends, the session is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import (
    AnswerReplaced,
    CloseSession,
    FirstTurn,
    GroupDropped,
    GroupOpened,
    HandOver,
    RevokeLease,
    RolloutReceived,
    RolloutsAnswered,
    RolloutsDropped,
    RolloutsEvaluated,
    RolloutsLeased,
    ScoreRecorded,
    ScoreRollout,
    SendTrained,
    StepPlanned,
    StepTrained,
)
from echo_hub.core.accounting.groups import LeasedRollout, RolloutGroup, Slot, SortedIds, Wants, oldest_of
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.snapshot import SessionLosses, StepRow
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.measured import CompletionLengths
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import TaskFigures
from echo_shared.wire.messages import DropReason, ReceiptState, rollout_id

NO_TASKS: Final[Mapping[str, TaskFigures]] = MappingProxyType({})

SCORINGS: Final = 32
"""Number of rollouts over which the running average of scoring times decays to 1/e."""
CANCELLED: Final = "its tenant cancelled the request"
CLEARED_AT_ONCE: Final = 16
"""Number of trained groups whose memory is freed in one turn of the coordinator."""


class Ledger:
    """All unfinished groups and rollouts, and the learner's queues. A group for the learner is *waiting* (open or
    complete) until a step plans it. Groups of other owners never wait."""

    def __init__(self, *, nodes: Nodes, out: Outbox, discount: float | None = None) -> None:
        """`discount`: discount of the returns that give each turn its own advantage. None: each episode has one
        advantage."""
        self._nodes = nodes
        self._discount = discount
        self._out = out
        self._held_by: dict[str, dict[str, LeasedRollout]] = {}
        self._by_version: dict[int, set[int]] = {}
        """For each version, the learner's groups with a rollout that was leased or sampled with this version."""
        self.lengths = CompletionLengths()
        self.scoring_s = 0.0
        """Running average of the seconds from a rollout's arrival to its reward."""
        self.num_under_way = 0
        """Number of rollouts that nodes hold and that are neither late nor past their deadline."""
        self.num_queue_changes = 0
        """Counter that grows whenever a group joins or leaves one of the learner's queues."""
        self.wants = Wants()
        self._episodes_go_on = False
        """True once any episode had several turns. From then on, a received turn need not end its episode, so only
        complete groups are handed to the learner."""
        self._gone: deque[RolloutGroup] = deque()
        """Trained groups that are still in memory: `clear_away` frees some per turn."""
        self.groups: dict[int, RolloutGroup] = {}
        self.session_groups: dict[int, RolloutGroup] = {}
        """Groups whose episodes are sessions and whose leases were asked for."""
        self._has_sessions = False
        """True once the ledger has had a group whose episodes are sessions."""
        self._lost: dict[int, list[SessionLosses]] = {}
        """Numbers of lost sessions from before the hub's restart, by group id, until the group is restored."""
        self.rollouts: dict[str, LeasedRollout] = {}
        self.waiting = SortedIds()
        self.complete = SortedIds()
        self.flat = SortedIds()

    def add_group(self, group: RolloutGroup) -> None:
        """Add a new or restored group. The caller then restores the rollouts of a restored group."""
        self.groups[group.group_id] = group
        self._has_sessions = self._has_sessions or group.session is not None
        for row in self._lost.pop(group.group_id, ()):
            if row.index < len(group.slots):
                slot = group.slots[row.index]
                slot.attempt, slot.losses, slot.replaced = row.attempt, row.losses, row.replaced
        if group.owner.for_learner:
            self.waiting.add(group.group_id)
            self.num_queue_changes += 1
        if group.asked_for:
            self.ask_for(group)

    def restore_losses(self, rows: Iterable[SessionLosses]) -> None:
        """Restore the numbers of lost sessions that the store has from before the hub's restart. Call this before
        groups are restored.
        """
        for row in rows:
            self._lost.setdefault(row.group_id, []).append(row)

    def take_from_queues(self, group_ids: Collection[int]) -> None:
        """Remove these groups from the learner's queues, because the plan of a step contains them."""
        for ids in (self.waiting, self.complete, self.flat):
            ids.discard_all(group_ids)
        self.num_queue_changes += 1

    def open_group(self, group: RolloutGroup) -> None:
        """Open a new group that has at least one unfinished episode."""
        self.add_group(group)
        if group.owner.for_learner:
            self._out.record(GroupOpened(group_id=group.group_id, seed=group.seed, prompt=group.prompt))

    def ask_for(self, group: RolloutGroup) -> None:
        """Offer the rollouts of a group that was opened with `asked_for` False for leasing from now on."""
        group.asked_for = True
        if group.session is not None:
            self.session_groups[group.group_id] = group
        self.wants.note_all(group)

    def lease(self, record: RolloutsLeased, now: float, goes_on: Iterable[tuple[int, int]] = ()) -> list[LeasedRollout]:
        """Record a lease; the caller sends it to the node. `goes_on`: the pairs that `begun` returned, of an index and
        the id of the earlier lease whose tokens the index continues."""
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
        """Return which indices of this lease can continue the tokens of an earlier lease, as pairs of index and earlier
        lease id. Call this before `lease`.

        The earlier lease must belong to the same node or to a proven one. The node that returns a completion answers
        for all its tokens, so an unproven node could plant forged tokens for which an honest node is punished. Without
        `oldest`, the earlier lease must name the same version. With `oldest`, the earlier lease may also name an older
        version, if none of its tokens was sampled with a version older than `oldest`.
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
        """Return the expected length of the group's completions; 0 if nothing was measured yet."""
        return group.expected_tokens or self.lengths_of(group).mean_tokens

    def lengths_of(self, group: RolloutGroup) -> CompletionLengths:
        """Return the lengths of earlier completions by which the hub predicts this group's: those of the same tenant,
        or those of the run itself."""
        own = group.owner.lengths
        return self.lengths if own is None else own

    def held_by(self, node_id: str) -> list[LeasedRollout]:
        """Return the rollouts that the node holds, in leasing order."""
        return list(self._held_by.get(node_id, {}).values())

    def note_begun(self, rollout_ids: Iterable[str]) -> None:
        """Note that nodes have streamed the first tokens of these rollouts to the hub, so that another node can
        continue them. Ids of finished rollouts are ignored.
        """
        for begun_id in rollout_ids:
            if (rollout := self.rollouts.get(begun_id)) is not None:
                rollout.is_begun = True

    def expire(self, rollout: LeasedRollout, now: float) -> None:
        """Mark a rollout whose deadline has passed (overdue). Its index may be leased again; a result that still
        arrives may win."""
        self.num_under_way -= not rollout.late
        rollout.overdue = True
        self._nodes.expire(rollout.node_id, now, was_late=rollout.late)
        self.blame(rollout)
        self._begin_if_newer(rollout)
        self.wants.note(self.groups[rollout.group_id], rollout.index)

    def mark_late(self, rollout: LeasedRollout, now: float, *, is_slow: bool) -> None:
        """Mark a rollout as late: its node takes too long (`is_slow`) or has left. Another node may sample it too, and
        the first valid result wins."""
        self.num_under_way -= 1
        if is_slow:
            self.note_missing(rollout, now)
        self._nodes.mark_late(rollout.node_id, now)
        rollout.late = True
        self.blame(rollout)
        self._begin_if_newer(rollout)
        self.wants.note(self.groups[rollout.group_id], rollout.index)

    def note_missing(self, rollout: LeasedRollout, now: float) -> None:
        """Lower the node's measured speed because a rollout did not arrive in time or is no longer wanted. Assume the
        length of the longest completions for it: completions of one prompt vary, and a long completion does not mean a
        slow node."""
        lengths = self.lengths_of(self.groups[rollout.group_id])
        num_tokens = max(rollout.expected_tokens, lengths.long_tokens)
        self._nodes.miss(rollout.node_id, num_tokens, now - rollout.leased_at)

    def blame(self, rollout: LeasedRollout) -> None:
        """Note that this rollout's node failed on the index, so that other nodes are tried first."""
        group = self.groups[rollout.group_id]
        group.is_plain = False
        group.slots[rollout.index].blame(rollout.node_id)

    def fail(self, rollout: LeasedRollout, reason: DropReason, detail: str) -> None:
        """Drop the rollout after a failure of its node; other nodes are tried first for its index. If the node gave the
        rollout back, the next lease may continue its tokens. After any other failure, sampling starts from the
        beginning."""
        if reason is not DropReason.RETURNED:
            self.groups[rollout.group_id].slots[rollout.index].begun = None
        self.blame(rollout)
        self.drop([rollout], reason, detail)

    def receive(
        self,
        rollout: LeasedRollout,
        payload: RolloutPayload,
        now: float,
        *,
        oldest_version: int | None = None,
        is_scored_later: bool = False,
    ) -> None:
        """Change a rollout's state from leased to received. The rollout wins its index's current turn, which must not
        have a winner. `oldest_version`: version that sampled its first token; None: the lease's version.
        `is_scored_later`: the caller has the rollout scored once it is checked."""
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
        self.lengths_of(group).seen(group.prompt, rollout.num_tokens)
        self._end_lease(rollout)
        group.num_tokens += rollout.num_tokens
        group.slots[rollout.index].winner = rollout
        group.note_age(rollout)
        self.wants.settle(group, rollout.index)
        self._out.record(RolloutReceived(rollout_id=rollout.rollout_id, received_at=now, payload=payload))
        self._move(rollout, ReceiptState.RECEIVED)
        first = None if rollout.turn else FirstTurn(group.group_id, payload)
        rollout.payload = payload if first and group.owner.keeps_payloads else None
        if not is_scored_later:
            self.have_scored(rollout, first)
        if not self._episodes_go_on and group.has_come_in:
            self._hand_over(group)

    def have_scored(self, rollout: LeasedRollout, first_turn: FirstTurn | None = None) -> None:
        """Have a received rollout scored. `first_turn`: the rollout's tokens, if they are still in memory."""
        attempt = self.groups[rollout.group_id].slots[rollout.index].attempt
        self._out.act(ScoreRollout(rollout_id=rollout.rollout_id, attempt=attempt, first_turn=first_turn))

    def score(self, rollout: LeasedRollout, reward: float) -> None:
        """Move a received rollout that ended its episode to the state scored. The last episode completes the group, and
        all remaining leases of the group are revoked."""
        self._record_score(rollout, reward)
        rollout.reward = reward
        self._nodes.trust(rollout.node_id, in_time=not rollout.overdue)
        group = self.groups[rollout.group_id]
        group.num_ended += 1
        self._close_session(group, rollout.index)
        self.note_complete(group)
        if group.complete:
            self.revoke(group.still_leased, DropReason.EXPIRED)
            if self._episodes_go_on:
                self._hand_over(group)

    def _record_score(self, rollout: LeasedRollout, reward: float | None) -> None:
        """Record the reward of an ended episode. A rollout that is scored already gets it in place of the environment's
        answer (`replace_answer`)."""
        name, components = rollout.rollout_id, rollout.components
        rollout.components = None
        if rollout.state is ReceiptState.SCORED:
            self._out.record(AnswerReplaced(rollout_id=name, reward=reward, components=components))
            return
        self._out.record(ScoreRecorded(rollout_id=name, reward=reward, components=components))
        self._move(rollout, ReceiptState.SCORED)

    def _close_session(self, group: RolloutGroup, index: int) -> None:
        """Close the session of an episode, and free the episode's slot, one of a limited number of slots for open
        sessions.
        """
        if group.session is not None:
            attempt = group.slots[index].attempt
            self._out.act(CloseSession(group_id=group.group_id, index=index, attempt=attempt))
            self.num_queue_changes += 1

    def note_scoring(self, rollout: LeasedRollout, now: float) -> None:
        if rollout.received_at is not None:
            self.scoring_s += (now - rollout.received_at - self.scoring_s) / SCORINGS

    def evaluate(self, rollout: LeasedRollout, reward: float | None) -> None:
        """Change the states of an ended evaluation episode's rollouts, earlier turns included, from received to scored,
        and then to evaluated.
        """
        self._record_score(rollout, reward)
        if reward is not None:
            self._nodes.trust(rollout.node_id, in_time=not rollout.overdue)
        group = self.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        # Revoke the other leases of this turn. A restarted hub does not restore evaluated turns, so it could not send
        # these leases again.
        if slot.turns:
            self.revoke(slot.leased, DropReason.EXPIRED)
        turns = slot.received
        self._out.record(RolloutsEvaluated(rollout_ids=tuple(turn.rollout_id for turn in turns)))
        for turn in turns:
            self._move(self.rollouts.pop(turn.rollout_id), ReceiptState.EVALUATED)
        slot.turns, slot.winner, slot.is_over, slot.begun = (), None, True, None
        group.num_ended += 1
        self._close_session(group, rollout.index)
        self._close_if_complete(group)

    def answer(self, rollout: LeasedRollout) -> None:
        """Change the state of a received rollout of a tenant's request to answered."""
        self._nodes.trust(rollout.node_id, in_time=not rollout.overdue)
        group = self.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        self._out.record(RolloutsAnswered(rollout_ids=(rollout.rollout_id,)))
        self._move(self.rollouts.pop(rollout.rollout_id), ReceiptState.ANSWERED)
        slot.winner, slot.is_over, slot.begun = None, True, None
        group.num_ended += 1
        self._close_if_complete(group)

    def give_up(self, group: RolloutGroup, indices: Iterable[int]) -> None:
        """Drop the rollouts of these indices of a tenant's group, and never lease these indices again."""
        gone = tuple(indices)
        for index in gone:
            group.slots[index].is_over = True
            self.wants.settle(group, index)
        self.drop([rollout for index in gone for rollout in group.slots[index].received], DropReason.REVOKED, CANCELLED)
        self.revoke([rollout for index in gone for rollout in group.slots[index].leased], DropReason.REVOKED)
        group.num_ended += len(gone)
        self._close_if_complete(group)

    def _close_if_complete(self, group: RolloutGroup) -> None:
        if group.complete:
            self.revoke(group.still_leased, DropReason.EXPIRED)
            self._forget(group.group_id)

    def go_on(
        self, rollout: LeasedRollout, observation_ids: NDArray[np.int32], *, turn_reward: float = 0.0, now: float = -inf
    ) -> None:
        """Move a received rollout to the state scored after the environment answered this turn. The episode's next turn
        wants a lease from now on."""
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
        if group.session is not None:
            slot.answered_at = now
        self.wants.note(group, rollout.index)

    def replace_answer(
        self, turn: LeasedRollout, observation_ids: NDArray[np.int32] | None, *, turn_reward: float, now: float
    ) -> None:
        """Replace the environment's answer to the newest answered turn, because its rebuilt session gives another one.
        The caller has dropped the turns after it. `observation_ids` None: the answer ends the episode, and the group's
        owner then ends the episode with this turn."""
        group = self.groups[turn.group_id]
        slot = group.slots[turn.index]
        assert slot.turns[-1] is turn and slot.winner is None and not slot.leased, "nothing follows the turn"
        group.is_plain, self._episodes_go_on = False, True
        slot.failed_on, slot.num_returns, slot.begun, slot.answered_at = (), 0, None, now
        turn.turn_reward = turn_reward
        if observation_ids is None:
            slot.turns, slot.winner = slot.turns[:-1], turn
        else:
            replaced = AnswerReplaced(
                rollout_id=turn.rollout_id, reward=None, observation_ids=observation_ids, turn_reward=turn_reward
            )
            self._out.record(replaced)
        self.wants.note(group, turn.index)

    def draw_again(self, rollout: LeasedRollout, detail: str) -> None:
        """Drop a received rollout after a scorer failure. Its turn wants a lease with another seed. Other leases of the
        turn are revoked: their seed would reproduce the failed completion."""
        slot = self.groups[rollout.group_id].slots[rollout.index]
        self.revoke(slot.leased, DropReason.EXPIRED)
        slot.failed_draws += (slot.turn,)
        self.fail(rollout, DropReason.SCORER_FAILED, detail)

    def draw_newer(self, group: RolloutGroup, oldest_version: int) -> None:
        """Drop every episode that contains tokens of a version older than `oldest_version`. Each such episode wants a
        lease again, from its first turn on. The longest dropped completion becomes the group's expected length if it is
        longer."""
        group.num_redraws += 1
        for slot in group.slots:
            drawn = slot.received
            if any(rollout.oldest_version < oldest_version for rollout in drawn):
                if slot.turns:  # The prompts of the current leases contain these turns.
                    self.revoke(slot.leased, DropReason.STALE)
                group.expected_tokens = max(group.expected_tokens, *(rollout.num_tokens for rollout in drawn))
                self.drop(drawn, DropReason.STALE)
                slot.begun = None

    def drop(self, rollouts: Iterable[LeasedRollout], reason: DropReason, detail: str = "") -> None:
        """Drop rollouts in any state. An index that loses its last rollout wants a lease again."""
        dropped = tuple(rollouts)
        if not dropped:
            return
        ids = tuple(rollout.rollout_id for rollout in dropped)
        self._out.record(RolloutsDropped(rollout_ids=ids, reason=reason, detail=detail))
        if self._has_sessions and reason is not DropReason.SESSION_LOST:
            self._close_sessions(dropped)
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

    def _close_sessions(self, dropped: Iterable[LeasedRollout]) -> None:
        """Close the sessions to which these rollouts may have been given. A session that is needed again is rebuilt."""
        received = [rollout for rollout in dropped if rollout.state is not ReceiptState.LEASED]
        for group_id, index in dict.fromkeys((rollout.group_id, rollout.index) for rollout in received):
            self._close_session(self.groups[group_id], index)

    def _take_out(self, group: RolloutGroup, rollout: LeasedRollout) -> None:
        was_complete = group.complete
        group.take_out(rollout)
        if was_complete and not group.complete:
            self.complete.discard(group.group_id)
            self.flat.discard(group.group_id)
            self.num_queue_changes += 1

    def revoke(self, rollouts: Iterable[LeasedRollout], reason: DropReason) -> None:
        """Drop leased rollouts, and tell each node to stop if no rollout of the lease is wanted any more: nodes can
        only stop whole leases."""
        revoked = sorted(rollouts, key=lambda rollout: rollout.lease_id)
        self.drop(revoked, reason)
        for lease_id, of_lease in groupby(revoked, key=lambda rollout: rollout.lease_id):
            one = next(of_lease)
            if all(other.lease_id != lease_id for other in self.groups[one.group_id].still_leased):
                self._out.act(RevokeLease(node_id=one.node_id, lease_id=lease_id, reason=reason))

    def stop(self, rollout: LeasedRollout) -> None:
        """Tell the node of a received rollout to stop, unless it still holds other rollouts of the same lease."""
        group = self.groups.get(rollout.group_id)
        if group is None or all(other.lease_id != rollout.lease_id for other in group.still_leased):
            self._out.act(RevokeLease(node_id=rollout.node_id, lease_id=rollout.lease_id, reason=DropReason.DUPLICATE))

    def drop_group(self, group: RolloutGroup, reason: DropReason) -> None:
        self.drop(group.received, reason)
        self.revoke(group.still_leased, reason)
        self._forget(group.group_id)
        if group.owner.for_learner:
            self._out.record(GroupDropped(group_id=group.group_id, reason=reason))

    def plan(
        self, step: int, group_ids: tuple[int, ...], now: float, *, by_task: Mapping[str, TaskFigures] = NO_TASKS
    ) -> StepRow:
        """Record the batch of `step`. Its groups, all complete, leave the learner's queues."""
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
        """Change the batch's rollouts from scored to trained. Rollouts of the groups in `left_out` change from scored
        to dropped."""
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
                self.session_groups.pop(group_id, None)

    def clear_away(self) -> None:
        """Free the memory of some trained groups. Freeing all groups of a large step at once would block the event
        loop."""
        gone = self._gone
        if gone:
            for _ in range(min(CLEARED_AT_ONCE, len(gone))):
                gone.popleft()

    def waiting_from_before(self, oldest_version: int) -> list[RolloutGroup]:
        """Return the waiting groups with a rollout that was leased or sampled with a version older than
        `oldest_version`, by id. The call forgets these old versions, so a later call returns a group again only because
        of another old version."""
        found: set[int] = set()
        for version in [version for version in self._by_version if version < oldest_version]:
            found |= self._by_version.pop(version)
        return [self.groups[group_id] for group_id in sorted(found) if group_id in self.waiting]

    def _hand_over(self, group: RolloutGroup) -> None:
        if group.owner.for_learner:
            ids = tuple(group.received_ids)
            self._out.act(HandOver(group_id=group.group_id, rollout_ids=ids, first_turns=group.take_first_turns()))

    def _begin(self, slot: Slot, rollout: LeasedRollout) -> None:
        """Let the next lease of the index continue this rollout's tokens. Exception: tokens of an unproven node do not
        replace tokens of a proven node with the same version."""
        before = slot.begun
        if (
            before is None
            or before.policy_version != rollout.policy_version
            or self._nodes.is_proven(rollout.node_id)
            or not self._nodes.is_proven(before.node_id)
        ):
            slot.begun = rollout

    def _begin_if_newer(self, rollout: LeasedRollout) -> None:
        """Let the next lease continue this rollout's tokens if its lease is newer than that of the rollout kept in
        `begun`. `_begin` may have refused the rollout while its node was unproven."""
        slot = self.groups[rollout.group_id].slots[rollout.index]
        if slot.begun is not None and slot.begun.lease_id < rollout.lease_id:
            self._begin(slot, rollout)

    def _forget(self, group_id: int) -> None:
        group = self.groups.pop(group_id)
        self.session_groups.pop(group_id, None)
        self.num_queue_changes += 1
        for ids in (self.waiting, self.complete, self.flat):
            ids.discard(group_id)
        group.owner.wanting.discard(group_id)

    def note_complete(self, group: RolloutGroup) -> None:
        """Put a group that is complete now into the queue of complete groups. If its rewards are equal, also put it
        into the queue of flat groups."""
        if group.complete and group.owner.for_learner:
            self.complete.add(group.group_id)
            self.num_queue_changes += 1
            if not group.has_advantage(discount=self._discount):
                self.flat.add(group.group_id)

    def note_version(self, group: RolloutGroup, policy_version: int) -> None:
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
        """Restore a lease that a node holds from before the hub's restart."""
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
