"""One rollout, one index and one group while they are on their way: plain state, owned and changed by the ledger.

An index of a group is one *episode*. In a task of one turn it is one rollout; with an environment it is a rollout for
each of its turns, leased one after the other, because each turn's prompt holds all that was said before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo_shared.messages import ReceiptState
from echo_shared.rewards import all_equal


@dataclass(slots=True, eq=False)
class LeasedRollout:
    """One leased rollout that is not final: `leased`, `received` or `scored`."""

    rollout_id: str
    lease_id: int
    node_id: str
    group_id: int
    index: int
    policy_version: int
    turn: int = 0
    """Of its episode; 0 = the first."""
    state: ReceiptState = ReceiptState.LEASED
    num_tokens: int = 0
    """Drawn tokens, once it is received."""
    reward: float | None = None
    """Of its episode, if this turn ended it."""
    overdue: bool = False


@dataclass(slots=True, eq=False)
class Slot:
    """One index of a group. Several nodes may hold its turn in progress; the first valid result wins."""

    turns: tuple[LeasedRollout, ...] = ()
    """Scored turns that the environment has answered, in order."""
    winner: LeasedRollout | None = None
    """Of the turn in progress: received, or scored and the last of its episode."""
    leased: tuple[LeasedRollout, ...] = ()
    """Of the turn in progress."""
    failed_on: tuple[str, ...] = ()
    """Nodes that gave it back, let it expire or failed at it, the latest last: others are asked first."""
    scorer_failures: int = 0
    """Completions of the turn in progress that the scorer failed on; each was drawn with a seed of its own."""
    num_returns: int = 0
    evaluated: bool = False
    """Of an evaluation: its episode has ended, and its rollouts are final."""

    @property
    def turn(self) -> int:
        """The turn in progress."""
        return len(self.turns)

    @property
    def wants_lease(self) -> bool:
        return not self.is_won and all(rollout.overdue for rollout in self.leased)

    @property
    def is_won(self) -> bool:
        """Another result of the turn in progress is a duplicate."""
        return self.evaluated or self.winner is not None

    @property
    def received(self) -> tuple[LeasedRollout, ...]:
        """All turns that have come in, in order."""
        return self.turns if self.winner is None else (*self.turns, self.winner)


@dataclass(slots=True, eq=False)
class RolloutGroup:
    """The episodes of one prompt. `complete`: every one has ended and is scored; nothing of it is leased any more."""

    group_id: int
    seed: int
    slots: list[Slot]
    num_ended: int = 0
    """Episodes that have ended and are scored."""
    num_tokens: int = 0
    """Drawn tokens of what has been received."""
    unleased: set[int] = field(default_factory=set)
    """Indices that want a lease."""
    pinned_version: int | None = None
    """Of an evaluation: the only version that may draw it."""
    asked_for: bool = True
    """False: of an evaluation from before a restart, of which nothing is leased until it is wanted again."""

    @property
    def complete(self) -> bool:
        return self.num_ended == len(self.slots)

    @property
    def received(self) -> list[LeasedRollout]:
        """In the order of their indices and turns."""
        return [rollout for slot in self.slots for rollout in slot.received]

    @property
    def still_leased(self) -> list[LeasedRollout]:
        return [rollout for slot in self.slots for rollout in slot.leased]

    @property
    def oldest_version(self) -> int | None:
        """Of what has been received, earlier turns included; None before the first."""
        return min((rollout.policy_version for rollout in self.received), default=None)

    @property
    def has_advantage(self) -> bool:
        """Whether the rewards of its episodes differ."""
        won = [slot.winner.reward for slot in self.slots if slot.winner is not None]
        return not all_equal([reward for reward in won if reward is not None])
