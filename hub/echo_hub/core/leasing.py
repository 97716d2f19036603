"""Who works on what: which members of which group go to which node, and when.

What is leased is the member of a group. Steps come in their order, a step's work no sooner than it is needed
(`tempo`). In a step the completions that are likely to become long come first, and go to nodes that draw them in what a
typical rollout takes: so each node gets the longest that suits its pace, whoever asks first. What is left then goes to
whoever has it back in time, the shortest first: slow nodes draw short completions. A lease is no larger than what its
node, at its own pace, brings back in time (`terms`), behind what it holds already, but so large that reading a long
prompt costs little beside the drawing.

A node too slow for the step in hand works for a later one: a step's work is released the earlier to a node, the longer
that node takes. Nobody is asked for what would be stale by the time that it is back: a group is as old as its oldest
member. Where the learner waits, nothing is under way but what is late, and nobody would do, anybody will.

An index whose node takes far longer than the longest completions would take it, or has left, is *late*: it may be
leased to another node as well, and the first valid result wins. One past its deadline is *overdue*: its node is
thought to have lost it. An index that failed on a node is offered to others first, and to strangers only when nobody
else is there; to the same one only when no other takes work. A node that comes back is sent again what it holds: what
was sent into a dying connection is lost.

What the hub has of an index is gone on with, where a proven node drew it, by the version that began it, as long as that
is fresh enough, or, if completions are interrupted, by any newer one: a lease says of each index with which earlier
lease of it it goes on, and, sent again, that it goes on with itself.

Beside training, others may own groups: evaluations. While training and one of these both want leases, one of
`EVALUATION_SHARE` leased rollouts is the other's, counted from the last time that it wanted none; what training does
not want, it gets too. So neither starves the other: training waits no longer than a node takes to finish what it holds.

The first turns of a group's episodes share a prompt and a seed, and so may share a lease. Each later turn is a lease of
its own, with a seed of its own; within a group, the episodes that are furthest come first.

A turn whose completion the scorer failed on is drawn again with another seed: the same one would give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Final, Literal

from echo_hub.core.admission import Outlook, oldest_useful_version
from echo_hub.core.effects import RolloutsLeased, SendLease
from echo_hub.core.groups import GroupOwner, LeasedRollout, RolloutGroup
from echo_hub.core.ledger import Ledger
from echo_hub.core.nodes.node import UNPROVEN, Node
from echo_hub.core.nodes.ready import Nodes, slowest_token_s, speed_class
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.takers import Takers, length_class
from echo_hub.core.tempo import Tempo
from echo_hub.core.terms import ANY, EARLIER, SOON_S, TYPICAL, Terms, is_late, terms_of_step, typical_s
from echo_shared.draws import derive_seed
from echo_shared.messages import rollout_id

EVALUATION_SHARE: Final = 4

LATE: Final = 1.5
"""Times what the longest completions take on a node, queued behind what it holds, until one is late."""
LATE_S: Final = 2.0
"""Besides, for the way there and back."""
LEFT_S: Final = 10.0
"""A node that has left may come back so long before what it holds is late."""
SLOWEST_S: Final = 3_600.0
"""Nobody is so slow that a step's work is released to it so long before the step begins."""
AT_ONCE: Final = 64
"""Groups among which the longest are looked for: StreamRL (arXiv 2504.15930) begins with what takes longest."""
YOUNGEST: Final = 16
"""Groups among which one is looked for that a node may have a turn with."""
LOOKED_AT_ONCE: Final = 256
"""Leases that are looked at for being late in one turn."""
LEASED_AT_ONCE: Final = 128
"""Leases that are made in one turn: what a large step wants besides is leased in the next, which follow at once."""


def turn_seed(group_seed: int, turn: int, attempt: int = 0) -> int:
    """The seed of the draws of one turn of a group's episodes. `attempt`: so often the scorer has failed on it."""
    if attempt:
        return derive_seed(group_seed, turn, attempt)
    return derive_seed(group_seed, turn) if turn else group_seed


class _Share:
    """What an owner beside training is due: it grows by one with each rollout leased to another owner while this one
    wants leases too."""

    def __init__(self, owner: GroupOwner) -> None:
        self.owner = owner
        self.due = 0

    def leased(self, owner: GroupOwner, num_rollouts: int) -> None:
        if owner is self.owner:
            if self.due > 0:  # Else nobody else wanted it.
                self.due -= (EVALUATION_SHARE - 1) * num_rollouts
        elif len(self.owner.wanting):
            self.due += num_rollouts
        else:
            self.due = 0


class Leasing:
    """`_watched` holds each lease, with those of its rollouts that it had at first, by when it is looked at: to see
    whether it is late, or past its deadline, or whether its node is still away. `beside`: the owners of groups that are
    not the learner's."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ledger: Ledger,
        nodes: Nodes,
        out: Outbox,
        beside: Iterable[GroupOwner],
        next_lease_id: int,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._nodes = nodes
        self._takers = Takers(ledger=ledger, nodes=nodes)
        self._out = out
        self._next_lease_id = next_lease_id
        self._watched: list[tuple[float, Literal["late", "away", "overdue"], int, tuple[int, ...]]] = []
        self._release_at = inf
        self._nobody_would = False
        """Whether the learner waits, nobody is at work for it and nobody was found that would be back in time."""
        self._may_lease = LEASED_AT_ONCE
        """Leases that may still be made in this turn."""
        self._goes_on_at = inf
        """When this turn began, if it ended before all was leased."""
        self._notice_from = -inf
        """Nodes faster than this class, if they come to have room, change nothing before `_release_at`."""
        self._asked: tuple[int, Outlook] | None = None
        """Where things stood when there was last nobody to lease to; None: there may be somebody."""
        self._unsent: set[str] = set()
        """Nodes that have come back and have not been sent again what they hold."""
        self._shares = [_Share(owner) for owner in beside]

    @property
    def due_at(self) -> float:
        """When there is something to do even if nothing happens before; inf = never."""
        return min(self._watched[0][0] if self._watched else inf, self._release_at, self._goes_on_at)

    def change(self, settings: CoordinatorSettings) -> None:
        """From now on; where nothing may be leased, nothing is due that would be."""
        self._settings, self._asked = settings, None
        self._release_at = self._goes_on_at = inf

    def end_run(self) -> None:
        """No step's work is released any more."""
        self._release_at = inf

    def watch(self, lease_id: int, indices: tuple[int, ...], deadline: float) -> None:
        """From its deadline on, the unfinished rollouts of the lease are leased again."""
        heappush(self._watched, (deadline, "overdue", lease_id, indices))

    def begin_turn(self, now: float) -> bool:
        """Whether there is more to lease, whatever has changed: the last turn left some, or it is time for a step's
        work. What is past its deadline is leased again, and what is late may be."""
        more = now >= self._goes_on_at or now >= self._release_at
        if more:
            self._asked = None
        self._may_lease, self._goes_on_at = LEASED_AT_ONCE, inf
        if self._watched and self._watched[0][0] <= now:
            self._look_after(now)
        return more

    def _look_after(self, now: float) -> None:
        """What is past its deadline is leased again; what is late may be."""
        for _ in range(LOOKED_AT_ONCE):
            if not self._watched:
                return
            at, what, lease_id, indices = self._watched[0]
            still_leased = self._still_leased(lease_id, indices)
            if at > now and still_leased:
                return
            heappop(self._watched)
            for rollout in still_leased:
                if what == "overdue":
                    self._ledger.expire(rollout, now)
                elif not rollout.late and (what == "late" or not self._nodes.is_connected(rollout.node_id)):
                    self._ledger.mark_late(rollout, now, is_slow=what == "late")

    def _still_leased(self, lease_id: int, indices: Iterable[int]) -> list[LeasedRollout]:
        """What of the lease is within its deadline and has not come in."""
        found = (self._ledger.rollouts.get(rollout_id(lease_id, index)) for index in indices)
        return [rollout for rollout in found if rollout is not None and rollout.in_time]

    def left(self, node_id: str, now: float) -> None:
        """The node is gone, perhaps for a moment."""
        self._unsent.discard(node_id)
        for lease_id, of_lease in self._held_leases(node_id):
            heappush(self._watched, (now + LEFT_S, "away", lease_id, tuple(rollout.index for rollout in of_lease)))

    def came(self, node_id: str) -> None:
        """The node has joined, or is back."""
        self._unsent.add(node_id)

    def send_again(self, node_id: str, now: float) -> None:
        """What the node holds, once after it has come back; what it has already it will not draw twice."""
        if node_id in self._unsent:
            self._unsent.discard(node_id)
            for _, of_lease in self._held_leases(node_id):
                self._send(of_lease, now)

    def _held_leases(self, node_id: str) -> list[tuple[int, list[LeasedRollout]]]:
        """The node's leases, those past their deadline left out."""
        leases: dict[int, list[LeasedRollout]] = {}
        for rollout in self._ledger.held_by(node_id):
            if not rollout.overdue:
                leases.setdefault(rollout.lease_id, []).append(rollout)
        return sorted(leases.items())

    def dispatch(
        self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook, tempo: Tempo, num_changes: int
    ) -> None:
        """Leases the groups that wait for the learner until no node is left that may do them. `newest_version`: what a
        lease may name. `num_changes`: grows with whatever changes for the learner or for its next steps."""
        if self._asked == (self._nodes.num_changes + self._ledger.wants.num_changes + num_changes, outlook):
            return
        num_leases = self._next_lease_id
        self._offer(owner, now, newest_version=newest_version, outlook=outlook, tempo=tempo)
        if self._next_lease_id == num_leases and tempo.waits and not self._ledger.num_under_way:
            self._nobody_would = True
            self._offer(owner, now, newest_version=newest_version, outlook=outlook, tempo=tempo)
            self._nobody_would = False
        self._asked = (self._nodes.num_changes + self._ledger.wants.num_changes + num_changes, outlook)
        if not self._may_lease:
            self._goes_on_at = now

    def _offer(self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook, tempo: Tempo) -> None:
        """Offers nodes what waits, step by step."""
        wanting, waiting, start = owner.wanting, self._ledger.waiting, 0
        self._release_at, self._notice_from, self._nodes.heeds_relief = inf, inf, False
        self._takers.begin()
        while start < len(wanting) and self._nodes.any_ready and self._may_lease:
            step = outlook.step_of(waiting.position(wanting[start]))
            if oldest_useful_version(self._settings, step) > newest_version:
                break  # Younger groups need versions at least as new.
            end = outlook.end_of(step)
            next_steps = waiting[end] if end < len(waiting) else None
            stop = len(wanting) if next_steps is None else wanting.position(next_steps)
            terms = terms_of_step(
                step,
                stop - start,
                now,
                num_wanting=len(wanting),
                settings=self._settings,
                ledger=self._ledger,
                nodes=self._nodes,
                outlook=outlook,
                tempo=tempo,
            )
            if terms.early_s:
                self._release_at = min(self._release_at, now + terms.early_s)
            elif self._nobody_would and is_late(step, outlook, tempo):
                terms = replace(terms, in_s=inf)
            if terms.not_before_s > SLOWEST_S:
                break
            refused: int | None = None
            if not terms.not_before_s:
                self._notice_from, self._nodes.heeds_relief = -inf, True
                refused = self._lease_groups(wanting[start : min(stop, start + AT_ONCE)], terms, now)
            elif self._anyone_slow(wanting[start : min(stop, start + AT_ONCE)], terms, now):
                refused = self._lease_groups(wanting[start : min(stop, start + AT_ONCE)], terms, now)
            if refused is not None:
                start += refused
            else:
                start = len(wanting) if next_steps is None else wanting.position(next_steps)
        done = start >= len(wanting) or (self._nodes.any_ready and self._may_lease)
        self._nodes.notice_from(self._notice_from if done else -inf, most_avoided=self._takers.most_avoided)

    def _anyone_slow(self, group_ids: Iterable[int], terms: Terms, now: float) -> bool:
        """Whether anyone who has room may be slow enough to be asked for these groups already. As for the others: when
        the next of them will be; until then, only who is slower than those needs to be noticed."""
        groups = self._ledger.groups
        longest = max(self._ledger.expected_tokens(groups[group_id]) for group_id in group_ids)
        if not longest:
            self._notice_from = -inf
            return True
        needed = speed_class(terms.not_before_s / longest)
        enough, following = self._nodes.slowest(terms.oldest, needed)
        self._notice_from = min(self._notice_from, following + 1 if following > UNPROVEN else needed)
        if following > UNPROVEN:
            release_s = EARLIER * (terms.not_before_s - longest * slowest_token_s(following))
            self._release_at = min(self._release_at, now + max(SOON_S, release_s))
        return enough or self._nodes.unproven_wait

    def _lease_groups(self, group_ids: Iterable[int], terms: Terms, now: float) -> int | None:
        """Leases these groups, one at least: first those that are likely to become the longest, each to a node whose
        pace suits it; then what is left to anybody who has it back in time, the shortest first. How many of them still
        want leases, from nodes that they have not failed on; None: no node is left that may take any."""
        expected_tokens = self._ledger.expected_tokens
        groups = sorted((self._ledger.groups[group_id] for group_id in group_ids), key=expected_tokens, reverse=True)
        suited, left = terms, list[RolloutGroup]()
        longest, shortest = expected_tokens(groups[0]), expected_tokens(groups[-1])
        if not terms.not_before_s and length_class(longest) > length_class(shortest):
            suited = replace(terms, suits_s=typical_s(self._ledger, self._nodes) or inf)
        left.extend(group for group in groups if not self._lease_all(group, suited, now))
        refused, seen_at = 0, -1
        for group in reversed(left):
            if self._lease_all(group, terms, now):
                continue
            if not self._may_lease or group.is_plain:
                return None
            if seen_at != self._next_lease_id and self._takers.find(group, terms) is None:
                return None
            seen_at = self._next_lease_id  # Somebody has room, and has it until another lease is made.
            refused += 1
        return refused

    def _lease_all(self, group: RolloutGroup, terms: Terms, now: float) -> bool:
        """Leases what the group wants. False when nobody may take all of it."""
        while group.unleased and self._may_lease and self._lease_some(group, terms, now):
            pass
        return not group.unleased

    def dispatch_beside(self, now: float, *, within_share: bool) -> None:
        """Leases all other groups: only what is due to their owners beside training, or all that nodes take."""
        self._takers.begin()
        for share in self._shares:
            wanting, turn = share.owner.wanting, 0
            if not wanting:
                continue
            while turn < len(wanting) and (share.due > 0 or not within_share) and self._nodes.any_ready:
                if not self._may_lease:
                    self._goes_on_at = now
                    return
                turn += not self._lease_some(self._ledger.groups[wanting[turn]], ANY, now)

    def _lease_some(self, group: RolloutGroup, terms: Terms, now: float) -> bool:
        """One lease of the group, to the next node that may take an index of it. False when there is none."""
        if not self._takers.any_left(group, terms):
            return False
        if group.is_plain:
            found = self._takers.find(group, terms)
            if found is None:
                self._takers.note_nobody(group, terms)
                return False
            node, most = found
            self._lease_to(node, group, tuple(sorted(group.unleased)[:most]), terms, now)
            return True
        for index in sorted(group.unleased, key=lambda index: (-group.slots[index].turn, index)):
            found = self._takers.find(group, terms, self._takers.avoided(group.slots[index], terms.oldest))
            if found is not None:
                node, most = found
                turn = group.slots[index].turn
                indices = (index,) if turn else self._first_turns(node, group, index, terms)[:most]
                self._lease_to(node, group, indices, terms, now)
                return True
        self._takers.note_nobody(group, terms)
        return False

    def lease_turn(self, node: Node, now: float) -> str | None:
        """One member of the youngest group that the learner may still take, to a node that is too slow for what there
        is; others are asked for it as well. The rollout's id; None: there is nothing for the node."""
        for group_id in reversed(self._ledger.waiting.last(YOUNGEST)):
            group = self._ledger.groups[group_id]
            free = [i for i, slot in enumerate(group.slots) if not slot.is_won and not slot.turn and not slot.leased]
            if free and group.asked_for and node.free > 0:
                self._lease_to(node, group, (free[-1],), ANY, now)
                given = group.slots[free[-1]].leased[-1]
                self._ledger.mark_late(given, now, is_slow=False)
                return given.rollout_id
        return None

    def _first_turns(self, node: Node, group: RolloutGroup, like: int, terms: Terms) -> tuple[int, ...]:
        """The indices of the group, all at their first turn with the seed of index `like`, that the node may take."""
        attempt = group.slots[like].scorer_failures
        return tuple(
            index
            for index, slot in ((index, group.slots[index]) for index in sorted(group.unleased))
            if (slot.turn, slot.scorer_failures) == (0, attempt)
            and node.node_id not in self._takers.avoided(slot, terms.oldest)
        )

    def _lease_to(self, node: Node, group: RolloutGroup, indices: tuple[int, ...], terms: Terms, now: float) -> None:
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        self._may_lease -= 1
        for share in self._shares:
            share.leased(group.owner, len(indices))
        deadline = now + self._settings.deadline_s
        late_at = now + self._lateness_s(node, group, len(indices), terms)
        record = RolloutsLeased(
            lease_id=lease_id,
            node_id=node.node_id,
            group_id=group.group_id,
            indices=indices,
            turn=group.slots[indices[0]].turn,
            policy_version=group.owner.lease_version(group, node),
            deadline=deadline,
        )
        mixes = self._settings.interrupts and group.owner.for_learner
        goes_on = () if node.is_hub else self._ledger.begun(record, oldest=terms.oldest if mixes else None)
        leased = self._ledger.lease(record, now, goes_on)
        self.watch(lease_id, indices, deadline)
        if late_at < deadline and not node.is_hub:
            heappush(self._watched, (late_at, "late", lease_id, indices))
        self._send(leased, now, goes_on)

    def _lateness_s(self, node: Node, group: RolloutGroup, count: int, terms: Terms) -> float:
        """How long the node may take for what it is given, before others are asked too."""
        lengths = self._ledger.lengths
        if not lengths.long_tokens or not self._nodes.typical_token_s:
            return inf
        if node.proven:
            queued = node.held_tokens + (count - 1) * self._ledger.expected_tokens(group)
            return LATE_S + LATE * node.pace.finish_s(queued, lengths.long_tokens)
        usual_s = typical_s(self._ledger, self._nodes)
        in_time_s = max(usual_s, terms.left_s - TYPICAL * usual_s)  # Else nobody else could do it for this step.
        return min(in_time_s, LATE_S + LATE * count * lengths.long_tokens * self._nodes.typical_token_s)

    def _send(
        self, rollouts: Sequence[LeasedRollout], now: float, goes_on: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        """Rollouts of one lease, to the node that they are leased to. `goes_on`: None when it is sent again."""
        first = rollouts[0]
        group = self._ledger.groups[first.group_id]
        self._out.act(
            SendLease(
                node_id=first.node_id,
                lease_id=first.lease_id,
                group_id=first.group_id,
                indices=tuple(rollout.index for rollout in rollouts),
                turn=first.turn,
                seed=turn_seed(group.seed, first.turn, group.slots[first.index].scorer_failures),
                policy_version=first.policy_version,
                deadline_s=first.deadline - now,
                may_move_on=group.owner.may_move_on,
                goes_on=goes_on if goes_on is not None else tuple((each.index, each.lease_id) for each in rollouts),
            )
        )
