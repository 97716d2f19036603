"""Assignment of group members to nodes: which node gets which rollouts, and when.

The unit of work is one member of a group. Steps are served in order, and a step's groups are leased no earlier than
needed (`sizing`). Within a step, completions that are likely long come first. They go to nodes that sample them within
a typical rollout's time, so each node gets the longest completions that suit its speed. The rest goes, shortest first,
to any node that returns it in time, so slow nodes get short completions.

A node too slow for the current step works for a later step: slower nodes get a step's groups earlier. A group is as old
as its oldest rollout, so no node gets a rollout that would be stale on return. One exception: if the learner is idle,
no rollout is expected in time and no node is fast enough, any node may take the work.

An index (one member of a group) that failed on a node goes to other nodes first, and to unproven ones (strangers) only
if no proven node is present. The node on which it failed gets the index again only if no other node takes work. While a
node holds an index, however late, it never gets the index a second time.

If the hub has tokens of an unfinished completion from a proven node, the next node continues them. The lease then names
the version that sampled them while it is fresh enough, or any newer version if nodes may switch versions within a
completion. For each index, a lease names the earlier lease whose tokens are continued.

Other group owners (evaluations, tenants' samples) share the nodes with training. While both want leases, one in
`EVALUATION_SHARE` leased rollouts goes to the other owner. It also gets the capacity that training does not want. So
neither side starves, and training waits at most until a node finishes its current work.

An episode consists of one or more turns, each a completion. First turns of a group's episodes share prompt and seed, so
one lease may hold several. Later turns have separate leases and seeds. Within a group, the episodes with the most
finished turns come first.

An episode whose environment is a session holds a slot while it waits for a lease. So later turns of such episodes are
leased before all other work, across groups and steps. A later turn goes to the node that drew the turn before, which
may still have the keys of the conversation, if it has the version that the lease names. If that node is busy, the turn
waits `SAME_NODE_S` for it, and then goes to any node.

After a scorer failure the turn is sampled again with another seed. The same seed would reproduce the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from echo_hub.core.accounting.effects import RolloutsLeased
from echo_hub.core.accounting.groups import GroupOwner, RolloutGroup, Slot, SortedIds
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.nodes.node import UNPROVEN, Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.nodes.speed_classes import slowest_token_s, speed_class
from echo_hub.core.policy.measured import Tempo
from echo_hub.core.policy.outstanding import OutstandingLeases
from echo_hub.core.policy.sizing import (
    ANY,
    EARLIER,
    SOON_S,
    LeaseTerms,
    Outlook,
    StepWork,
    Supply,
    lateness_s,
    oldest_useful_version,
    terms_of_step,
)
from echo_hub.core.policy.takers import Takers, length_class
from echo_hub.core.settings import CoordinatorSettings

EVALUATION_SHARE: Final = 4
"""One in this many leased rollouts goes to other owners than training, such as evaluations, while both want leases. Set
by hand."""
SLOWEST_S: Final = 3_600.0
"""A step's groups are leased at most this many seconds before the step begins, even to the slowest node. Set by
hand."""
AT_ONCE: Final = 64
"""Number of a step's oldest groups with rollouts to lease that are sorted by expected length, so that the longest are
leased first, as in StreamRL (arXiv 2504.15930). Set by hand."""
YOUNGEST: Final = 16
"""Number of youngest groups among which `lease_turn` looks for a single rollout for a slow node. Set by hand."""
SAME_NODE_S: Final = 0.5
"""Seconds for which a later turn of a session waits for the node that drew the turn before. Set by hand: most nodes
need longer for the prefill of a conversation of a thousand tokens."""
LEASED_AT_ONCE: Final = 128
"""Maximum number of leases made in one turn of the coordinator. The next turn, which follows at once, makes the rest.
Set by hand."""


class _Share:
    """Share of leased rollouts for an owner other than training. While `due` is above 0, the owner leases before
    training. If the owner wants leases, each rollout leased to another owner adds 1 to `due`. Each own rollout
    subtracts `EVALUATION_SHARE` - 1, if `due` is above 0."""

    def __init__(self, owner: GroupOwner) -> None:
        self.owner = owner
        self.due = 0

    def leased(self, owner: GroupOwner, num_rollouts: int) -> None:
        if owner is self.owner:
            if self.due > 0:  # At 0 or less the owner used capacity that no other owner wanted.
                self.due -= (EVALUATION_SHARE - 1) * num_rollouts
        elif len(self.owner.wanting):
            self.due += num_rollouts
        else:
            self.due = 0


class Leasing:
    """Leases the groups of all owners to nodes. `beside`: the owners other than training, such as evaluations."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ledger: Ledger,
        nodes: Nodes,
        outstanding: OutstandingLeases,
        beside: Iterable[GroupOwner],
        next_lease_id: int,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._nodes = nodes
        self._takers = Takers(ledger=ledger, nodes=nodes)
        self._outstanding = outstanding
        self._next_lease_id = next_lease_id
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
        """Speed class: until `_release_at`, nodes faster than this class get no work. So their new capacity is no
        reason to offer work again."""
        self._asked: tuple[int, Outlook] | None = None
        """Counters and outlook after all waiting groups were last offered to nodes. While both stay equal, another
        offer is useless; None: offer all again."""
        self._shares = [_Share(owner) for owner in beside]
        self._same_node_until = inf
        """Time until which the first of the later turns waits that wait for the node of the turn before; inf = none
        waits."""

    @property
    def due_at(self) -> float:
        """Return the time at which `begin_turn` will offer work again, because all nodes may then lease a step's work
        or a session's later turn, or because the last turn left work. inf = never."""
        return min(self._release_at, self._goes_on_at, self._same_node_until)

    def change(self, settings: CoordinatorSettings) -> None:
        """Apply new settings, and offer all work again under them."""
        self._settings, self._asked = settings, None
        self._release_at = self._goes_on_at = inf

    def end_run(self) -> None:
        """Cancel the timer for the work of future steps."""
        self._release_at = inf

    def begin_turn(self, now: float) -> bool:
        """Prepare for the coordinator's next event. Return True if leases may be possible now although nothing has
        changed since the last event: its limit on new leases left groups waiting, or a step's groups or a later turn's
        rollouts may be leased from now on."""
        more = now >= self._goes_on_at or now >= self._release_at or now >= self._same_node_until
        if more:
            self._asked = None
        if now >= self._same_node_until:
            self._same_node_until = inf
        self._may_lease, self._goes_on_at = LEASED_AT_ONCE, inf
        return more

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
        if self._ledger.session_groups:
            self._offer_later_turns(owner, now, newest_version=newest_version, outlook=outlook, tempo=tempo)
        while start < len(wanting) and self._nodes.any_ready and self._may_lease:
            step = outlook.step_of(waiting.position(wanting[start]))
            if oldest_useful_version(self._settings, step) > newest_version:
                break  # Even the newest version is too old, and later steps need newer ones.
            terms, stop, next_steps = self._terms(step, wanting, start, outlook=outlook, tempo=tempo, now=now)
            if terms.early_s:
                self._release_at = min(self._release_at, now + terms.early_s)
            elif self._takes_any and tempo.waits and step == outlook.next_step:
                terms = terms._replace(in_s=inf)
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

    def _offer_later_turns(
        self, owner: GroupOwner, now: float, *, newest_version: int, outlook: Outlook, tempo: Tempo
    ) -> None:
        """Lease the later turns of the learner's sessions, step by step, however early the step's other work would
        be."""
        wanting, start = owner.wanting, 0
        while start < len(wanting) and self._nodes.any_ready and self._may_lease:
            step = outlook.step_of(self._ledger.waiting.position(wanting[start]))
            if oldest_useful_version(self._settings, step) > newest_version:
                return
            terms, stop, next_steps = self._terms(step, wanting, start, outlook=outlook, tempo=tempo, now=now)
            groups = [self._ledger.groups[group_id] for group_id in wanting[start:stop]]
            for group in [group for group in groups if group.wants_later_turns]:
                self._notice_from, self._nodes.heeds_relief = -inf, True
                self._lease_later_turns(group, terms._replace(not_before_s=0.0), now)
            start = len(wanting) if next_steps is None else wanting.position(next_steps)

    def _lease_later_turns(self, group: RolloutGroup, terms: LeaseTerms, now: float) -> None:
        """Lease the later turns of a group's sessions, the episodes with the most finished turns first."""
        indices = [index for index in group.unleased if group.slots[index].turns]
        for index in sorted(indices, key=lambda index: (-group.slots[index].turn, index)):
            node = self._taker_of_turn(group, group.slots[index], terms, now) if self._may_lease else None
            if node is not None:
                self._lease_to(node, group, (index,), terms, now)

    def _taker_of_turn(self, group: RolloutGroup, slot: Slot, terms: LeaseTerms, now: float) -> Node | None:
        same, is_worth_waiting = self._takers.same_node(group, slot, terms)
        if same is not None:
            return same
        until = slot.answered_at + SAME_NODE_S
        if is_worth_waiting and now < until:
            self._same_node_until = min(self._same_node_until, until)
            return None
        avoided = self._takers.avoided(slot, terms.oldest, self._takers.unwilling(group))
        found = self._takers.find(group, terms, avoided)
        return None if found is None else found[0]

    def _terms(
        self, step: int, wanting: SortedIds, start: int, *, outlook: Outlook, tempo: Tempo, now: float
    ) -> tuple[LeaseTerms, int, int | None]:
        """Return the terms of a step's work, the position in `wanting` after its groups, and the first group of the
        steps after it; None: there is none. `start`: position of the step's first group in `wanting`."""
        waiting, end = self._ledger.waiting, outlook.end_of(step)
        next_steps = waiting[end] if end < len(waiting) else None
        stop = len(wanting) if next_steps is None else wanting.position(next_steps)
        terms = terms_of_step(
            StepWork(step, stop - start, self._num_missing(end), len(waiting) - len(wanting)),
            self._supply,
            settings=self._settings,
            outlook=outlook,
            tempo=tempo,
            num_ready=self._nodes.num_ready,
            now=now,
        )
        return terms, stop, next_steps

    @property
    def _supply(self) -> Supply:
        nodes, lengths = self._nodes, self._ledger.lengths
        return Supply(
            rollout_s=lengths.mean_tokens / nodes.tokens_per_s if nodes.tokens_per_s else None,
            typical_s=lengths.mean_tokens * nodes.typical_token_s + nodes.typical_way_s,
            longer=lengths.longer,
            scoring_s=self._ledger.scoring_s,
        )

    def _num_missing(self, end: int) -> int:
        """Return how many groups before position `end` of the learner's queue are incomplete."""
        waiting, complete = self._ledger.waiting, self._ledger.complete
        num_complete = complete.position(waiting[end]) if end < len(waiting) else len(complete)
        return min(end, len(waiting)) - num_complete

    def _any_slow(self, group_ids: Iterable[int], terms: LeaseTerms, now: float) -> bool:
        """Return True if some node with free capacity is so slow, or of unknown speed, that it must begin with these
        groups now, before faster nodes.

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
            suited = terms._replace(suits_s=terms.typical_s or inf)
        left.extend(group for group in groups if not self._lease_all(group, suited, now))
        refused, seen_at = 0, -1
        for group in reversed(left):
            if self._lease_all(group, terms, now):
                continue
            if not self._may_lease or group.is_plain:
                return None
            if seen_at != self._next_lease_id and self._takers.find(group, terms) is None:
                return None
            seen_at = self._next_lease_id  # The search found a node, which stays free until the next lease.
            refused += 1
        return refused

    def _lease_all(self, group: RolloutGroup, terms: LeaseTerms, now: float) -> bool:
        while group.unleased and self._may_lease and self._lease_some(group, terms, now):
            pass
        return not group.unleased

    def dispatch_beside(self, now: float, *, within_share: bool) -> None:
        """Lease groups of other owners than training. With `within_share`, lease only as many rollouts as the owners'
        shares (`_Share`) allow, otherwise until nodes take no more."""
        self._takers.begin()
        for share in self._shares:
            wanting, turn = share.owner.wanting, 0
            if not wanting:
                continue
            for group_id in [*wanting] if self._ledger.session_groups else ():
                group = self._ledger.groups[group_id]
                if (share.due > 0 or not within_share) and group.wants_later_turns:
                    self._lease_later_turns(group, ANY, now)
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
        unwilling = self._takers.unwilling(group)
        in_order = sorted(group.unleased, key=lambda index: (-group.slots[index].turn, index))
        if group.session is not None:  # Its later turns were offered before all other work.
            in_order = [index for index in in_order if not group.slots[index].turns]
        for index in in_order:
            found = self._takers.find(group, terms, self._takers.avoided(group.slots[index], terms.oldest, unwilling))
            if found is not None:
                node, most = found
                turn = group.slots[index].turn
                indices = (index,) if turn else self._first_turns(node, group, index, terms)[:most]
                self._lease_to(node, group, indices, terms, now)
                return True
        # Later turns may wait for the node that drew the turn before, while other nodes have free capacity.
        if not group.wants_later_turns:
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
        """Return the indices that one lease to the node may have: first turns that have the same seed as index `like`
        and that may go to this node (see `Takers.avoided`)."""
        attempt, unwilling = group.slots[like].scorer_failures, self._takers.unwilling(group)
        return tuple(
            index
            for index, slot in ((index, group.slots[index]) for index in sorted(group.unleased))
            if (slot.turn, slot.scorer_failures) == (0, attempt)
            and node.node_id not in self._takers.avoided(slot, terms.oldest, unwilling)
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
        late_s = lateness_s(
            node,
            terms,
            count=len(indices),
            expected_tokens=self._ledger.expected_tokens(group),
            long_tokens=self._ledger.lengths_of(group).long_tokens,
            token_s=self._nodes.typical_token_s,
        )
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
        self._outstanding.watch(lease_id, indices, deadline, late_at=now + late_s)
        self._outstanding.send(leased, now, goes_on)
