"""State of unfinished work: `LeasedRollout` is one rollout, `Slot` one index of a group, `RolloutGroup` one group.
`Wants` tracks which indices want a lease. The ledger owns and changes these objects.

Each group has an owner: training, an evaluation or the answering of tenants' requests. See `GroupOwner`.

Each index of a group is one *episode*. In a single-turn task an episode is one rollout. With an environment it is one
rollout per turn. Turns of an episode are leased in sequence, because each turn's prompt contains all earlier turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from echo_hub.core.accounting.effects import DrawnTurn
from echo_hub.core.accounting.events import RolloutArrived
from echo_hub.core.accounting.parameters import SamplingParameters, SessionRules
from echo_hub.core.nodes.node import Node
from echo_hub.core.policy.measured import CompletionLengths
from echo_shared.records.rewards import all_equal, of_each_turn, returns
from echo_shared.records.rollout import RolloutPayload
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import ReceiptState


@dataclass(slots=True, eq=False)
class LeasedRollout:
    """One rollout that was leased and is not trained, evaluated, answered or dropped: in state `leased`, `received` or
    `scored`."""

    rollout_id: str
    lease_id: int
    node_id: str
    group_id: int
    index: int
    policy_version: int
    """Version named by the lease. The node samples with this version or, if nodes may switch versions within a
    completion, also with newer ones."""
    turn: int = 0
    """Turn of the episode to which the rollout belongs; 0 = the first."""
    state: ReceiptState = ReceiptState.LEASED
    num_tokens: int = 0
    """Number of the rollout's sampled tokens; 0 until the rollout is received."""
    reward: float | None = None
    """Reward of the episode, if this turn ended it."""
    deadline: float = 0.0
    leased_at: float = 0.0
    received_at: float | None = None
    """Time of receipt; None if not received, or received before a restart."""
    expected_tokens: float = 0.0
    """Completion length in tokens that was expected when the rollout was leased."""
    overdue: bool = False
    """True once the lease's deadline has passed without the rollout."""
    late: bool = False
    """True if the node takes longer than expected or has left. Then another node may also lease the index."""
    oldest_version: int = 0
    """Oldest version that sampled any of the rollout's tokens. Until the rollout is received this is a lower bound: the
    lease's version, or the oldest version of the completion that the rollout continues."""
    drawn_by: tuple[str, ...] = ()
    """Nodes other than `node_id` that are known to have sampled the rollout's first tokens."""
    is_begun: bool = False
    """True if the hub has the unfinished rollout's first tokens, from any node."""
    is_checked: bool = False
    """True if `trust` has selected the rollout for a check by recomputation."""
    is_held: bool = False
    """True if `trust` keeps the scored rollout out of batches until its check ends."""
    components: Mapping[str, float] | None = None
    """Named parts of the reward, kept until the store has recorded them."""
    turn_reward: float = 0.0
    """Part of the episode's reward that this turn earned, if the environment answered the turn."""
    payload: RolloutPayload | None = None
    """Payload of a first turn, kept until its group is handed to the learner, or the rollout to its tenant."""

    @property
    def drawers(self) -> tuple[str, ...]:
        """Return all nodes that sampled tokens of the rollout."""
        return (*self.drawn_by, self.node_id)

    @property
    def in_time(self) -> bool:
        return self.state is ReceiptState.LEASED and not self.overdue


def oldest_of(rollouts: Iterable[LeasedRollout]) -> int | None:
    return min((rollout.oldest_version for rollout in rollouts), default=None)


@dataclass(slots=True, eq=False)
class Slot:
    """One index of a group, that is one episode. Several nodes may hold its current turn; the first valid result
    wins."""

    turns: tuple[LeasedRollout, ...] = ()
    """Earlier turns of the episode, in order: scored and answered by the environment."""
    winner: LeasedRollout | None = None
    """First valid rollout of the current turn: received, or scored if it ended the episode. None: not received yet."""
    leased: tuple[LeasedRollout, ...] = ()
    """Rollouts of the current turn that nodes hold."""
    failed_on: tuple[str, ...] = ()
    """Nodes on which this turn failed, the latest last: they returned it, let it expire or sent something invalid.
    Other nodes are tried first."""
    begun: LeasedRollout | None = None
    """Newest rollout of the current turn and seed whose sampled tokens another node may resume. A rollout of an
    unproven node never replaces one of a proven node with the same version."""
    failed_draws: tuple[int, ...] = ()
    """For each scorer failure, the turn on whose completion the scorer failed. Each failure changes the seed of the
    next attempt at this turn."""
    num_returns: int = 0
    answered_at: float = -inf
    """Time at which the session answered the newest of `turns`. -inf: before a restart, or the episode has no
    session."""
    attempt: int = 0
    """Number of times that the episode started again from its prompt because its session was lost."""
    losses: int = 0
    """Number of lost sessions that count towards the end of the episode."""
    replaced: int = 0
    """Number of turns whose answer a rebuilt session replaced."""
    is_over: bool = False
    """True for an ended episode of an evaluation, and for a tenant's sample that was delivered or cancelled."""

    @property
    def turn(self) -> int:
        return len(self.turns)

    @property
    def scorer_failures(self) -> int:
        return self.failed_draws.count(len(self.turns)) if self.failed_draws else 0

    @property
    def wants_lease(self) -> bool:
        if self.is_over or self.winner is not None:
            return False
        return not self.leased or all(rollout.overdue or rollout.late for rollout in self.leased)

    @property
    def held_by(self) -> tuple[str, ...]:
        """Return the nodes that may still sample the current turn: nodes with a lease of this turn whose deadline has
        not passed.
        """
        return tuple([rollout.node_id for rollout in self.leased if not rollout.overdue])

    @property
    def is_won(self) -> bool:
        """True if the current turn needs no further result: a valid rollout is received, or the episode is over."""
        return self.is_over or self.winner is not None

    @property
    def received(self) -> tuple[LeasedRollout, ...]:
        return self.turns if self.winner is None else (*self.turns, self.winner)

    def blame(self, node_id: str) -> None:
        """Note that this node failed on the index: put the node at the end of `failed_on`."""
        self.failed_on = (*(node for node in self.failed_on if node != node_id), node_id)


@dataclass(slots=True, eq=False)
class RolloutGroup:
    """The episodes of one prompt.

    A group is `complete` once all episodes are scored and no rollout waits for a check that keeps it out of batches. A
    complete group has no leases.
    """

    group_id: int
    seed: int
    slots: list[Slot]
    owner: GroupOwner
    num_ended: int = 0
    """Number of the group's episodes that have ended and are scored."""
    num_held: int = 0
    """Number of the group's scored rollouts that are kept out of batches until their checks end."""
    num_tokens: int = 0
    """Sampled tokens of all received rollouts."""
    unleased: set[int] = field(default_factory=set)
    """Indices that want a lease: no rollout of their current turn is received, and every node that holds the turn is
    late or overdue."""
    asked_for: bool = True
    """False: no index of the group wants a lease until its owner calls `Ledger.ask_for`."""
    prompt: int | None = None
    """Key of the prompt: equal prompts have equal keys. None if unknown."""
    prompt_tokens: int = 0
    expected_tokens: float = 0.0
    """Completion length expected when the group was opened."""
    num_redraws: int = 0
    """Number of times that received rollouts of the group became too old before the group was complete, so that they
    were sampled again."""
    oldest_version: int | None = None
    """Oldest version of all received rollouts, earlier turns included. None before the first."""
    oldest_leased: int | None = None
    """Oldest version of all leased and received rollouts."""
    is_plain: bool = True
    """True if every index that wants a lease is at its first turn and has failed on no node."""
    sampling: SamplingParameters | None = None
    """Sampling parameters of a tenant's request; None = the run's settings."""
    tenant: str = ""
    """Name of the tenant whose group it is, as nodes see it; empty = a group of the run."""
    adapter: int = 0
    """Version with which a tenant's group is drawn; 0 = a group of the run, or the base model."""
    only_checked: bool = False
    """True if the group's tenant wants only completions that passed a check."""
    session: SessionRules | None = None
    """Rules of the episodes' sessions; None if the group has no sessions."""
    _kept_from: frozenset[tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    """Cached value of `kept_from`; None = not computed."""

    @property
    def kept_from(self) -> frozenset[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the distinct pairs of two sets of nodes, over all indices that want a lease: nodes on which the index
        failed, and nodes that hold the index."""
        if self._kept_from is None:
            slots = [self.slots[index] for index in self.unleased]
            self._kept_from = frozenset((slot.failed_on, slot.held_by) for slot in slots)
        return self._kept_from

    @property
    def wants_later_turns(self) -> bool:
        """True if an episode with a session wants a lease for a turn after its first one."""
        return self.session is not None and any(self.slots[index].turns for index in self.unleased)

    def note_wants(self) -> None:
        """Discard the cached `kept_from`. Call this whenever `unleased` changes, or the slot of an index in
        `unleased`."""
        self._kept_from = None

    @property
    def complete(self) -> bool:
        return self.num_ended == len(self.slots) and not self.num_held

    @property
    def has_come_in(self) -> bool:
        """True if the current turn of every episode is received.

        If each of these turns ends its episode and passes its checks, the group is complete.
        """
        return all(slot.winner is not None for slot in self.slots)

    @property
    def received(self) -> list[LeasedRollout]:
        return [rollout for slot in self.slots for rollout in slot.received]

    @property
    def received_ids(self) -> list[str]:
        """Return the ids of the received rollouts, ordered by index and turn: the training order."""
        ids: list[str] = []
        for slot in self.slots:
            if slot.turns:
                ids += [turn.rollout_id for turn in slot.turns]
            if slot.winner is not None:
                ids.append(slot.winner.rollout_id)
        return ids

    def take_first_turns(self) -> tuple[DrawnTurn, ...] | None:
        """Return the payloads of all first turns and stop keeping them. Return None if any payload is missing."""
        taken: list[DrawnTurn] = []
        for slot in self.slots:
            won = slot.winner
            if won is not None and won.payload is not None and not slot.turns:
                of_lease = (won.rollout_id, won.node_id, won.policy_version, won.index)
                taken.append(DrawnTurn(*of_lease, self.seed, slot.scorer_failures, won.payload))
                won.payload = None
        return tuple(taken) if len(taken) == len(self.slots) else None

    @property
    def rewards(self) -> list[float]:
        won = [slot.winner.reward for slot in self.slots if slot.winner is not None]
        return [reward for reward in won if reward is not None]

    @property
    def still_leased(self) -> list[LeasedRollout]:
        return [rollout for slot in self.slots for rollout in slot.leased]

    def has_advantage(self, *, discount: float | None = None) -> bool:
        """Return True if the episodes' rewards differ.

        With a `discount`, compare the episodes' discounted returns turn by turn instead; one difference is enough.
        """
        if discount is None:
            return not all_equal(self.rewards)
        episodes = [
            returns(slot.winner.reward, [rollout.turn_reward for rollout in slot.turns], discount=discount)
            for slot in self.slots
            if slot.winner is not None and slot.winner.reward is not None
        ]
        return not all(map(all_equal, of_each_turn(episodes)))

    def note_age(self, rollout: LeasedRollout) -> None:
        if self.oldest_version is None or rollout.oldest_version < self.oldest_version:
            self.oldest_version = rollout.oldest_version

    def take_out(self, rollout: LeasedRollout) -> None:
        """Remove a received rollout from its slot. If the whole group is dropped, the rollout may belong to an earlier
        turn."""
        slot = self.slots[rollout.index]
        self.num_tokens -= rollout.num_tokens
        self.num_held -= rollout.is_held
        if slot.winner is rollout:
            slot.winner = None
            self.num_ended -= rollout.state is ReceiptState.SCORED
        else:
            slot.turns = tuple(other for other in slot.turns if other is not rollout)
        self.oldest_version = oldest_of(self.received)


class SortedIds(list[int]):
    """Group ids in ascending order. Change the list only by the methods that this class defines.

    Most changes happen at the two ends, where list operations are fast.
    """

    __slots__ = ()

    def __init__(self, ids: Iterable[int] = ()) -> None:
        super().__init__(sorted(ids))

    def __contains__(self, group_id: object) -> bool:
        assert isinstance(group_id, int)
        position = bisect_left(self, group_id)
        return position < len(self) and self[position] == group_id

    def add(self, group_id: int) -> None:
        position = bisect_left(self, group_id)
        if position == len(self) or self[position] != group_id:
            self.insert(position, group_id)

    def discard(self, group_id: int) -> None:
        position = bisect_left(self, group_id)
        if position < len(self) and self[position] == group_id:
            del self[position]

    def discard_all(self, group_ids: Collection[int]) -> None:
        gone = set(group_ids)
        self[:] = [group_id for group_id in self if group_id not in gone]

    def first(self, count: int) -> tuple[int, ...]:
        return tuple(self[:count])

    def last(self, count: int) -> tuple[int, ...]:
        return tuple(self[-count:])

    def position(self, group_id: int) -> int:
        return bisect_left(self, group_id)


class GroupOwner(Protocol):
    """The part of the coordinator that opened a group and decides on its leases and its end: training, evaluating
    or answering.

    Ledger, leasing and coordinator call a group's owner without knowing its kind. Owners never change a rollout's state
    themselves; they call the ledger.
    """

    @property
    def wanting(self) -> SortedIds:
        """Return the ids of the owner's groups with an index that wants a lease. The ledger maintains them."""

    @property
    def for_learner(self) -> bool:
        """True if the owner's groups wait in the learner's queues and have a row each in the store. Groups of other
        owners are never trained; the store only has their rollouts."""

    @property
    def may_move_on(self) -> bool:
        """True if nodes may switch to the newest published version in the middle of a completion of the owner's
        groups.
        """

    @property
    def keeps_payloads(self) -> bool:
        """True if a received first turn's payload is kept in memory until the owner passes it on."""

    @property
    def lengths(self) -> CompletionLengths | None:
        """Return the owner's own record of completion lengths; None if its completions count in the ledger's record."""

    def lease_version(self, group: RolloutGroup, node: Node) -> int:
        """Return the version to name in a lease of this group to this node."""

    def preferred(self, group: RolloutGroup) -> tuple[str, ...]:
        """Return the nodes that get the group's leases before others, the best first; empty = no preference."""

    def end_episode(self, rollout: LeasedRollout, reward: float) -> None:
        """Handle a received rollout that ended its episode with this reward."""

    def scorer_failed(self, rollout: LeasedRollout, detail: str) -> None:
        """Handle a received rollout that could not be scored."""

    def returned_too_often(self, group: RolloutGroup) -> None:
        """Handle a group with an index that nodes returned at least `MAX_RETURNS` times."""

    def end_run(self) -> None:
        """Drop all groups that are no longer needed after the last step is trained and published."""


class Wants:
    """Tracks which indices want a lease. It maintains `unleased` of each group, and `wanting` of each owner: the groups
    with an index in `unleased`. The caller must report every changed slot."""

    def __init__(self) -> None:
        self.num_changes = 0
        """Counter that grows whenever a rollout of a group may start to need a lease."""

    def note(self, group: RolloutGroup, index: int) -> None:
        """Update if an index wants a lease, after any change of its slot."""
        group.note_wants()
        if group.asked_for and group.slots[index].wants_lease:
            group.unleased.add(index)
            group.owner.wanting.add(group.group_id)
            self.num_changes += 1
        else:
            self.settle(group, index)

    def note_all(self, group: RolloutGroup) -> None:
        """Update all indices of a group that may be leased from now on."""
        group.note_wants()
        group.unleased.update([index for index, slot in enumerate(group.slots) if slot.wants_lease])
        if group.unleased:
            group.owner.wanting.add(group.group_id)
            self.num_changes += 1

    def settle(self, group: RolloutGroup, index: int) -> None:
        """Note that the index wants no lease any more."""
        group.note_wants()
        if index in group.unleased:
            group.unleased.discard(index)
            if not group.unleased:
                group.owner.wanting.discard(group.group_id)


def unlike_lease(event: RolloutArrived, rollout: LeasedRollout, *, owner: GroupOwner, newest: int | None) -> str:
    """Return how an arrived rollout contradicts its lease, as text for people; empty = not at all.

    `owner`: owner of the group. `newest`: newest version that a completion for the learner may have switched to; None:
    a completion must be sampled entirely with the lease's version.
    """
    first, last = event.policy_version_start, event.policy_version_end
    leased = (rollout.lease_id, rollout.group_id, rollout.index, rollout.policy_version, rollout.policy_version)
    if (event.lease_id, event.group_id, event.index, first, last) == leased:
        return event.problem
    said: dict[str, tuple[int, int]] = {
        "lease": (event.lease_id, rollout.lease_id),
        "group": (event.group_id, rollout.group_id),
        "index": (event.index, rollout.index),
    }
    mixed = ""
    if newest is None or not owner.for_learner:
        said["first policy version"] = (first, rollout.policy_version)
        said["last policy version"] = (last, rollout.policy_version)
    elif not first <= last <= max(newest, rollout.policy_version):
        mixed = f"policy versions {first} to {last}, newest published {newest}"
    wrong = [f"{name} {got} instead of {want}" for name, (got, want) in said.items() if got != want]
    return ", ".join([*wrong, *filter(None, [mixed, event.problem])])


def turn_seed(group_seed: int, turn: int, attempt: int = 0) -> int:
    """Return the sampling seed of one turn of a group. `attempt`: number of scorer failures on this turn."""
    if attempt:
        return derive_seed(group_seed, turn, attempt)
    return derive_seed(group_seed, turn) if turn else group_seed
