"""One rollout, one index and one group while they are on their way: plain state, owned and changed by the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo_shared.messages import ReceiptState


@dataclass(slots=True, eq=False)
class LeasedRollout:
    """One leased rollout that is not final: `leased`, `received` or `verified`."""

    rollout_id: str
    lease_id: int
    node_id: str
    group_id: int
    index: int
    policy_version: int
    state: ReceiptState = ReceiptState.LEASED
    overdue: bool = False


@dataclass(slots=True, eq=False)
class Slot:
    """One index of a group. Several nodes may hold it; the first valid result wins."""

    winner: LeasedRollout | None = None
    """Received or verified."""
    leased: tuple[LeasedRollout, ...] = ()
    failed_on: tuple[str, ...] = ()
    """Nodes that gave it back, let it expire or failed at it, the latest last: others are asked first."""
    scorer_failures: int = 0

    @property
    def wants_lease(self) -> bool:
        return self.winner is None and all(rollout.overdue for rollout in self.leased)


@dataclass(slots=True, eq=False)
class RolloutGroup:
    """The rollouts of one prompt. `complete`: every index is verified; nothing of it is leased any more."""

    group_id: int
    seed: int
    slots: list[Slot]
    num_verified: int = 0
    unleased: set[int] = field(default_factory=set)
    """Indices that want a lease."""

    @property
    def complete(self) -> bool:
        return self.num_verified == len(self.slots)

    @property
    def winners(self) -> list[LeasedRollout]:
        """In the order of their indices."""
        return [slot.winner for slot in self.slots if slot.winner is not None]

    @property
    def still_leased(self) -> list[LeasedRollout]:
        return [rollout for slot in self.slots for rollout in slot.leased]

    @property
    def oldest_version(self) -> int | None:
        """Of what has been received; None before the first."""
        return min((rollout.policy_version for rollout in self.winners), default=None)
