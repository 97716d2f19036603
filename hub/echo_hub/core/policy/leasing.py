"""Assignment of group members to nodes: which node gets which rollouts, and when.

The unit of work is one member of a group. Steps are served in order, and a step's groups are leased no earlier than
needed (`tempo`). Within a step, completions that are likely long come first. They go to nodes that sample them within a
typical rollout's time, so each node gets the longest completions that suit its speed. The rest goes, shortest first, to
any node that returns it in time, so slow nodes get short completions. A lease is no larger than its node can return in
time at its measured speed, after its current work (`terms`). It is large enough that the prefill of a long prompt costs
little per completion.

A node too slow for the current step works for a later step: slower nodes get a step's groups earlier. A group is as old
as its oldest rollout, so no node gets a rollout that would be stale on return. One exception: if the learner is idle,
no rollout is expected in time and no node is fast enough, any node may take the work.

An index is *late* if its node needs far longer than the longest completions take, or has left. Then another node may
lease the index too, and the first valid result wins. An index is *overdue* after its deadline: the node has probably
lost it. An index that failed on a node goes to other nodes first, and to unproven ones (strangers) only if no proven
node is present. The failed node gets such an index again only without any other candidate. A reconnected node is sent
its leases again, because the dying connection may have lost them.

If the hub has tokens of an unfinished completion from a proven node, the next node continues them. The lease then names
the version that sampled them while it is fresh enough, or any newer version if nodes may switch versions within a
completion. For each index, a lease names the earlier lease whose tokens are continued. A lease that is sent again
continues its own tokens.

Other owners, such as evaluations, share the nodes with training. While both want leases, one in `EVALUATION_SHARE`
leased rollouts goes to the other owner. It also gets the capacity that training does not want. So neither side starves,
and training waits at most until a node finishes its current work.

First turns of a group's episodes share prompt and seed, so one lease may hold several. Later turns have separate leases
and seeds. Within a group, the episodes with the most finished turns come first.

After a scorer failure the turn is sampled again with another seed. The same seed would reproduce the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Final, Literal

from echo_hub.core.accounting.effects import RolloutsLeased, SendLease
from echo_hub.core.accounting.groups import GroupOwner, LeasedRollout, RolloutGroup
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.nodes.node import UNPROVEN, Node
from echo_hub.core.nodes.ready import Nodes, slowest_token_s, speed_class
from echo_hub.core.policy.admission import Outlook, oldest_useful_version
from echo_hub.core.policy.takers import Takers, length_class
from echo_hub.core.policy.tempo import Tempo
from echo_hub.core.policy.terms import ANY, EARLIER, SOON_S, TYPICAL, LeaseTerms, is_late, terms_of_step, typical_s
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import rollout_id

EVALUATION_SHARE: Final = 4
"""One in this many leased rollouts goes to other owners than training, such as evaluations, while both want leases."""

LATE: Final = 1.5
"""A rollout is late after this many times the seconds that its node needs for the longest completions, after its
current work."""
LATE_S: Final = 2.0
"""Seconds added to that limit for the way to the node and back."""
LEFT_S: Final = 10.0
"""Seconds that a disconnected node has to return before its rollouts count as late."""
SLOWEST_S: Final = 3_600.0
"""Even the slowest node gets a step's groups at most this many seconds before the step begins."""
AT_ONCE: Final = 64
"""Number of oldest wanting groups of a step that are sorted by expected length, so that the longest are leased first,
as in StreamRL (arXiv 2504.15930)."""
YOUNGEST: Final = 16
"""Number of youngest groups among which `lease_turn` looks for a single rollout for a slow node."""
LOOKED_AT_ONCE: Final = 256
"""Maximum number of leases whose lateness or deadline is handled in one turn of the coordinator."""
LEASED_AT_ONCE: Final = 128
"""Maximum number of leases made in one turn of the coordinator. The next turn, which follows at once, makes the
rest."""


def turn_seed(group_seed: int, turn: int, attempt: int = 0) -> int:
    """Return the sampling seed of one turn of a group. `attempt`: number of scorer failures on this turn."""
    if attempt:
        return derive_seed(group_seed, turn, attempt)
    return derive_seed(group_seed, turn) if turn else group_seed


class _Share:
    """Leased rollouts that are due to an owner other than training (`due`), so that it gets its share.

    `due` grows by one with each rollout leased to another owner while this owner wants leases too.
    """

    def __init__(self, owner: GroupOwner) -> None:
        self.owner = owner
        self.due = 0

    def leased(self, owner: GroupOwner, num_rollouts: int) -> None:
        if owner is self.owner:
            if self.due > 0:  # Otherwise no other owner wanted this capacity.
                self.due -= (EVALUATION_SHARE - 1) * num_rollouts
        elif len(self.owner.wanting):
            self.due += num_rollouts
        else:
            self.due = 0


class Leasing:
    """Leases the groups of all owners to nodes, and watches the leases.

    `_watched` is a heap of (time, reason, lease id, indices). At that time the lease may be late, its deadline may
    pass, or its node may be absent too long. `beside`: the owners other than training, such as evaluations.
    """

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
        self._takes_any = False
        """True while any node may take work, however slow it is: the learner is idle, no rollout is expected in time,
        and no node is fast enough."""
        self._may_lease = LEASED_AT_ONCE
        """Number of leases that this turn may still make."""
        self._goes_on_at = inf
        """Time at which leasing must go on, because the last turn made `LEASED_AT_ONCE` leases; inf = all work was
        offered."""
        self._notice_from = -inf
        """Until `_release_at`, new capacity of nodes faster than this speed class changes nothing: they get no work
        yet."""
        self._asked: tuple[int, Outlook] | None = None
        """Counters and outlook after the last complete offer of the waiting groups. While unchanged, no group needs
        another offer; None: offer all again."""
        self._unsent: set[str] = set()
        """Connected nodes that have not been sent their current leases since they connected."""
        self._shares = [_Share(owner) for owner in beside]

    @property
    def due_at(self) -> float:
        """Return the time of the next watched lease, release of work, or pending offer; inf = none."""
        return min(self._watched[0][0] if self._watched else inf, self._release_at, self._goes_on_at)

    def change(self, settings: CoordinatorSettings) -> None:
        """Apply new settings, and offer all work again under them."""
        self._settings, self._asked = settings, None
        self._release_at = self._goes_on_at = inf

    def end_run(self) -> None:
        """Cancel the timer for the work of future steps: the run has ended."""
        self._release_at = inf

    def watch(self, lease_id: int, indices: tuple[int, ...], deadline: float) -> None:
        """Watch the lease's deadline. When it passes, the unfinished rollouts are leased again."""
        heappush(self._watched, (deadline, "overdue", lease_id, indices))

    def begin_turn(self, now: float) -> bool:
        """Mark late and overdue rollouts at the start of a turn.

        Return True if leases may be possible although no event changed anything: the last turn left work, or a step's
        work may be leased from now on.
        """
        more = now >= self._goes_on_at or now >= self._release_at
        if more:
            self._asked = None
        self._may_lease, self._goes_on_at = LEASED_AT_ONCE, inf
        if self._watched and self._watched[0][0] <= now:
            self._look_after(now)
        return more

    def _look_after(self, now: float) -> None:
        """Handle watched leases whose time has come: expire those past their deadline, and mark late ones."""
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
        """Return the lease's rollouts that are not received and within their deadline."""
        found = (self._ledger.rollouts.get(rollout_id(lease_id, index)) for index in indices)
        return [rollout for rollout in found if rollout is not None and rollout.in_time]

    def left(self, node_id: str, now: float) -> None:
        """Watch the leases of a node that disconnected: after `LEFT_S` without it they count as late."""
        self._unsent.discard(node_id)
        for lease_id, of_lease in self._held_leases(node_id):
            heappush(self._watched, (now + LEFT_S, "away", lease_id, tuple(rollout.index for rollout in of_lease)))

    def came(self, node_id: str) -> None:
        """Note that the node connected, so that its leases are sent again after its first report."""
        self._unsent.add(node_id)

    def send_again(self, node_id: str, now: float) -> None:
        """Send the node its current leases once after a reconnect. A node ignores leases that it still has."""
        if node_id in self._unsent:
            self._unsent.discard(node_id)
            for _, of_lease in self._held_leases(node_id):
                self._send(of_lease, now)

    def _held_leases(self, node_id: str) -> list[tuple[int, list[LeasedRollout]]]:
        """Return the node's leases without overdue rollouts, by lease id."""
        leases: dict[int, list[LeasedRollout]] = {}
        for rollout in self._ledger.held_by(node_id):
            if not rollout.overdue:
                leases.setdefault(rollout.lease_id, []).append(rollout)
        return sorted(leases.items())

    def dispatch(
        self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook, tempo: Tempo, num_changes: int
    ) -> None:
        """Lease the learner's waiting groups, until no suitable node is left."""
        if self._asked == (self._nodes.num_changes + self._ledger.wants.num_changes + num_changes, outlook):
            return
        num_leases = self._next_lease_id
        self._offer(owner, now, newest_version=newest_version, outlook=outlook, tempo=tempo)
        if self._next_lease_id == num_leases and tempo.waits and not self._ledger.num_under_way:
            self._takes_any = True
            self._offer(owner, now, newest_version=newest_version, outlook=outlook, tempo=tempo)
            self._takes_any = False
        self._asked = (self._nodes.num_changes + self._ledger.wants.num_changes + num_changes, outlook)
        if not self._may_lease:
            self._goes_on_at = now

    def _offer(self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook, tempo: Tempo) -> None:
        """Offer the waiting groups to nodes, step by step, and set the time of the next offer."""
        wanting, waiting, start = owner.wanting, self._ledger.waiting, 0
        self._release_at, self._notice_from, self._nodes.heeds_relief = inf, inf, False
        self._takers.begin()
        while start < len(wanting) and self._nodes.any_ready and self._may_lease:
            step = outlook.step_of(waiting.position(wanting[start]))
            if oldest_useful_version(self._settings, step) > newest_version:
                break  # Later steps need at least as new a version.
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
            elif self._takes_any and is_late(step, outlook, tempo):
                terms = replace(terms, in_s=inf)
            if terms.not_before_s > SLOWEST_S:
                break
            refused: int | None = None
            if not terms.not_before_s:
                self._notice_from, self._nodes.heeds_relief = -inf, True
                refused = self._lease_groups(wanting[start : min(stop, start + AT_ONCE)], terms, now)
            elif self._any_slow(wanting[start : min(stop, start + AT_ONCE)], terms, now):
                refused = self._lease_groups(wanting[start : min(stop, start + AT_ONCE)], terms, now)
            if refused is not None:
                start += refused
            else:
                start = len(wanting) if next_steps is None else wanting.position(next_steps)
        done = start >= len(wanting) or (self._nodes.any_ready and self._may_lease)
        self._nodes.notice_from(self._notice_from if done else -inf, most_avoided=self._takers.most_avoided)

    def _any_slow(self, group_ids: Iterable[int], terms: LeaseTerms, now: float) -> bool:
        """True if some node with free capacity is so slow that it must begin with these groups now, before faster
        nodes.

        Also set `_release_at` to the time at which the next faster node must begin.
        """
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

    def _lease_groups(self, group_ids: Iterable[int], terms: LeaseTerms, now: float) -> int | None:
        """Lease these groups (at least one) of one step.

        First pass: the groups that are likely longest, each to a node of suitable speed. Second pass: the rest,
        shortest first, to any node that returns them in time. Return how many groups remain because they failed on the
        nodes that are free; None: no node is left.
        """
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
            seen_at = self._next_lease_id  # A node has free capacity until the next lease.
            refused += 1
        return refused

    def _lease_all(self, group: RolloutGroup, terms: LeaseTerms, now: float) -> bool:
        """Lease all indices of the group that want a lease. Return False if no node was found for some."""
        while group.unleased and self._may_lease and self._lease_some(group, terms, now):
            pass
        return not group.unleased

    def dispatch_beside(self, now: float, *, within_share: bool) -> None:
        """Lease groups of other owners than training: with `within_share` only the rollouts due to them, otherwise
        until nodes take no more."""
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

    def _lease_some(self, group: RolloutGroup, terms: LeaseTerms, now: float) -> bool:
        """Make one lease of the group. Return False if no node may take any wanted index."""
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
        """Lease one rollout of the youngest possible group to a node that is too slow for all current work, to measure
        its speed.

        Other nodes may take the same index. Return the rollout's id; None: no suitable rollout.
        """
        for group_id in reversed(self._ledger.waiting.last(YOUNGEST)):
            group = self._ledger.groups[group_id]
            free = [i for i, slot in enumerate(group.slots) if not slot.is_won and not slot.turn and not slot.leased]
            if free and group.asked_for and node.free > 0:
                self._lease_to(node, group, (free[-1],), ANY, now)
                given = group.slots[free[-1]].leased[-1]
                self._ledger.mark_late(given, now, is_slow=False)
                return given.rollout_id
        return None

    def _first_turns(self, node: Node, group: RolloutGroup, like: int, terms: LeaseTerms) -> tuple[int, ...]:
        """Return the indices that one lease to the node may have: first turns with the seed of index `like` that never
        failed on the node."""
        attempt = group.slots[like].scorer_failures
        return tuple(
            index
            for index, slot in ((index, group.slots[index]) for index in sorted(group.unleased))
            if (slot.turn, slot.scorer_failures) == (0, attempt)
            and node.node_id not in self._takers.avoided(slot, terms.oldest)
        )

    def _lease_to(
        self, node: Node, group: RolloutGroup, indices: tuple[int, ...], terms: LeaseTerms, now: float
    ) -> None:
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

    def _lateness_s(self, node: Node, group: RolloutGroup, count: int, terms: LeaseTerms) -> float:
        """Return after how many seconds a rollout of this lease counts as late, so that other nodes get its index
        too."""
        lengths = self._ledger.lengths
        if not lengths.long_tokens or not self._nodes.typical_token_s:
            return inf
        if node.proven:
            queued = node.held_tokens + (count - 1) * self._ledger.expected_tokens(group)
            return LATE_S + LATE * node.pace.finish_s(queued, lengths.long_tokens)
        usual_s = typical_s(self._ledger, self._nodes)
        # After that, another node could not finish it for this step.
        in_time_s = max(usual_s, terms.left_s - TYPICAL * usual_s)
        return min(in_time_s, LATE_S + LATE * count * lengths.long_tokens * self._nodes.typical_token_s)

    def _send(
        self, rollouts: Sequence[LeasedRollout], now: float, goes_on: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        """Send rollouts of one lease to its node. `goes_on` None: the lease is sent again."""
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
