"""One rollout, one index and one group while they are on their way: plain state, owned and changed by the ledger.

What becomes of a group is not the ledger's to decide, but its owner's: see `GroupOwner`.

An index of a group is one *episode*. In a task of one turn it is one rollout; with an environment it is a rollout for
each of its turns, leased one after the other, because each turn's prompt holds all that was said before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from echo_hub.core.admission import SortedIds
from echo_hub.core.effects import DrawnTurn
from echo_hub.core.nodes.node import Node
from echo_shared.messages import ReceiptState
from echo_shared.rewards import all_equal, of_each_turn, returns
from echo_shared.rollout_books import RolloutPayload


@dataclass(slots=True, eq=False)
class LeasedRollout:
    """One leased rollout that is not final: `leased`, `received` or `scored`."""

    rollout_id: str
    lease_id: int
    node_id: str
    group_id: int
    index: int
    policy_version: int
    """That its lease names: what its node draws itself is by that, or, where completions are interrupted, by newer
    ones."""
    turn: int = 0
    """The turn of its episode; 0 = the first."""
    state: ReceiptState = ReceiptState.LEASED
    num_tokens: int = 0
    """Drawn tokens, once it is received."""
    reward: float | None = None
    """The reward of its episode, if this turn ended it."""
    deadline: float = 0.0
    leased_at: float = 0.0
    received_at: float | None = None
    """None: not yet, or before a restart."""
    expected_tokens: float = 0.0
    """What its node was expected to draw, when it was leased."""
    overdue: bool = False
    """Its deadline has passed."""
    late: bool = False
    """It takes longer than its node was expected to take, or its node has left: another may have it too."""
    oldest_version: int = 0
    """That has drawn any of it, once it is received. Before: none older has; that of what it goes on with."""
    drawn_by: tuple[str, ...] = ()
    """Other nodes that have drawn its beginning, as far as is known."""
    is_begun: bool = False
    """The hub has drawn tokens of it while it is unfinished: its own, or those that it goes on with."""
    is_checked: bool = False
    """It is or was to be computed again (`trust`)."""
    is_held: bool = False
    """It is scored, and no step may take it yet (`trust`)."""
    components: Mapping[str, float] | None = None
    """What the reward is made of, until that is recorded."""
    turn_reward: float = 0.0
    """What of its episode's reward it has earned, if the environment has answered it."""
    payload: RolloutPayload | None = None
    """Until its group is handed to the learner, where it has been one turn so far."""

    @property
    def drawers(self) -> tuple[str, ...]:
        """All nodes that have drawn any of it."""
        return (*self.drawn_by, self.node_id)

    @property
    def in_time(self) -> bool:
        """It is leased, and its deadline has not passed."""
        return self.state is ReceiptState.LEASED and not self.overdue


def oldest_of(rollouts: Iterable[LeasedRollout]) -> int | None:
    """The oldest version that has drawn any of these; None: there are none."""
    return min((rollout.oldest_version for rollout in rollouts), default=None)


@dataclass(slots=True, eq=False)
class Slot:
    """One index of a group. Several nodes may hold its turn in progress; the first valid result wins."""

    turns: tuple[LeasedRollout, ...] = ()
    """Scored turns that the environment has answered, in order."""
    winner: LeasedRollout | None = None
    """The rollout that won the turn in progress: received, or scored and the last of its episode."""
    leased: tuple[LeasedRollout, ...] = ()
    """Rollouts of the turn in progress that nodes hold."""
    failed_on: tuple[str, ...] = ()
    """Nodes that gave it back, let it expire or failed at it, the latest last: others are asked first."""
    begun: LeasedRollout | None = None
    """The newest of the turn in progress, and of its seed, whose drawn tokens another may go on with: it may be given
    back already. A stranger's takes the place of none that a proven node drew with the same version."""
    failed_draws: tuple[int, ...] = ()
    """The turn of each completion that the scorer failed on; each was drawn with a seed of its own."""
    num_returns: int = 0
    evaluated: bool = False
    """Whether, in an evaluation, its episode has ended and its rollouts are final."""

    @property
    def turn(self) -> int:
        """The turn in progress."""
        return len(self.turns)

    @property
    def scorer_failures(self) -> int:
        """Completions of the turn in progress that the scorer failed on."""
        return self.failed_draws.count(len(self.turns)) if self.failed_draws else 0

    @property
    def wants_lease(self) -> bool:
        if self.evaluated or self.winner is not None:
            return False
        return not self.leased or all(rollout.overdue or rollout.late for rollout in self.leased)

    @property
    def is_won(self) -> bool:
        """Whether another result of the turn in progress is a duplicate."""
        return self.evaluated or self.winner is not None

    @property
    def received(self) -> tuple[LeasedRollout, ...]:
        """All turns that have come in, in order."""
        return self.turns if self.winner is None else (*self.turns, self.winner)

    def blame(self, node_id: str) -> None:
        """It failed on this node, the latest."""
        self.failed_on = (*(node for node in self.failed_on if node != node_id), node_id)


@dataclass(slots=True, eq=False)
class RolloutGroup:
    """The episodes of one prompt. `complete`: every one has ended and is scored, and none is held; nothing of it is
    leased any more."""

    group_id: int
    seed: int
    slots: list[Slot]
    owner: GroupOwner
    num_ended: int = 0
    """Episodes that have ended and are scored."""
    num_held: int = 0
    """Rollouts that no step may take yet."""
    num_tokens: int = 0
    """Drawn tokens of what has been received."""
    unleased: set[int] = field(default_factory=set)
    """Indices that want a lease."""
    asked_for: bool = True
    """False: nothing of it is leased until its owner asks for it."""
    prompt: int | None = None
    """The key of its prompt, by which a prompt that comes again is known; None: it does not come again."""
    prompt_tokens: int = 0
    expected_tokens: float = 0.0
    """What each completion of it was expected to come to, when it was opened."""
    num_redraws: int = 0
    """How often what had come in of it was too old before the rest was there, and was drawn anew."""
    oldest_version: int | None = None
    """The oldest version of what has been received, earlier turns included; None before the first."""
    oldest_leased: int | None = None
    """The oldest version of what is leased or has been received."""
    is_plain: bool = True
    """All that wants a lease is a first turn that has failed nowhere."""
    _failures: frozenset[tuple[str, ...]] | None = None
    """None: not known."""

    @property
    def failures(self) -> frozenset[tuple[str, ...]]:
        """The nodes that what wants a lease has failed on, each combination once."""
        if self._failures is None:
            self._failures = frozenset(self.slots[index].failed_on for index in self.unleased)
        return self._failures

    def note_wants(self) -> None:
        """What wants a lease has changed, or where it has failed."""
        self._failures = None

    @property
    def complete(self) -> bool:
        return self.num_ended == len(self.slots) and not self.num_held

    @property
    def has_come_in(self) -> bool:
        """Whether the turn in progress of every episode has come in: if each is the last of its episode and passes,
        nothing is missing."""
        return all(slot.winner is not None for slot in self.slots)

    @property
    def received(self) -> list[LeasedRollout]:
        """All rollouts that have come in, in the order of their indices and turns."""
        return [rollout for slot in self.slots for rollout in slot.received]

    @property
    def received_ids(self) -> list[str]:
        """Of what has come in, in that order, which is that of training."""
        ids: list[str] = []
        for slot in self.slots:
            if slot.turns:
                ids += [turn.rollout_id for turn in slot.turns]
            if slot.winner is not None:
                ids.append(slot.winner.rollout_id)
        return ids

    def take_first_turns(self) -> tuple[DrawnTurn, ...] | None:
        """What has come in with its payloads, which are let go of here; None: not all of them are at hand."""
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
        """Of its episodes that have one, in order."""
        won = [slot.winner.reward for slot in self.slots if slot.winner is not None]
        return [reward for reward in won if reward is not None]

    @property
    def still_leased(self) -> list[LeasedRollout]:
        return [rollout for slot in self.slots for rollout in slot.leased]

    def has_advantage(self, *, discount: float | None = None) -> bool:
        """Whether the rewards of its episodes differ; with a `discount`: whether the returns from any turn on do."""
        if discount is None:
            return not all_equal(self.rewards)
        episodes = [
            returns(slot.winner.reward, [rollout.turn_reward for rollout in slot.turns], discount=discount)
            for slot in self.slots
            if slot.winner is not None and slot.winner.reward is not None
        ]
        return not all(map(all_equal, of_each_turn(episodes)))

    def note_age(self, rollout: LeasedRollout) -> None:
        """It has come in."""
        if self.oldest_version is None or rollout.oldest_version < self.oldest_version:
            self.oldest_version = rollout.oldest_version

    def take_out(self, rollout: LeasedRollout) -> None:
        """Of what has come in: the turn in progress, or any when the whole group is dropped."""
        slot = self.slots[rollout.index]
        self.num_tokens -= rollout.num_tokens
        self.num_held -= rollout.is_held
        if slot.winner is rollout:
            slot.winner = None
            self.num_ended -= rollout.state is ReceiptState.SCORED
        else:
            slot.turns = tuple(other for other in slot.turns if other is not rollout)
        self.oldest_version = oldest_of(self.received)


class GroupOwner(Protocol):
    """Who opened a group and answers for its leases, its drops and its end.

    Ledger, leasing and coordinator ask a group's owner, and never what kind of owner it is. Owners change no rollout's
    state by themselves: they tell the ledger what becomes of it.
    """

    @property
    def wanting(self) -> SortedIds:
        """Its groups that have an index that wants a lease; kept by the ledger."""

    @property
    def for_learner(self) -> bool:
        """Whether its groups wait in the learner's queues and have a row each in the store. Any other group is known
        by its rollouts alone, and no step takes it."""

    @property
    def may_move_on(self) -> bool:
        """Whether nodes may go on with its completions by the newest published version."""

    def lease_version(self, group: RolloutGroup, node: Node) -> int:
        """The version that a lease of this group to this node names."""

    def end_episode(self, rollout: LeasedRollout, reward: float) -> None:
        """The rollout, which is received, has ended its episode."""

    def scorer_failed(self, rollout: LeasedRollout, detail: str) -> None:
        """The rollout, which is received, could not be scored."""

    def returned_too_often(self, group: RolloutGroup) -> None:
        """Nodes gave an index of the group back `MAX_RETURNS` times, or more often."""

    def end_run(self) -> None:
        """The last step is trained and published: drops all groups that nobody waits for any more."""
