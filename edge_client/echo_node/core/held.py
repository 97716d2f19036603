"""The leases that this node holds, until each of their rollouts is finished, or is let go unfinished.

Bookkeeping alone: it knows neither engine nor hub. What it lets go it returns, for its caller to cancel and to say.

Invariants:
- every rollout of a lease leaves once: by `finish`, or in one `Unfinished`;
- a lease that may be interrupted is drawn by any version that is not older than the one that it names; each other one
  by that one alone;
- a lease on which the engine died `MAX_DEATHS` times is let go, and no other for its sake: from the death number
  `SUSPECT_DEATHS` on, the leases that were running then are sampled one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final

from echo_shared.messages import Lease
from echo_shared.sampling import GroupRequest

MAX_DEATHS: Final = 3
SUSPECT_DEATHS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What is not finished of a lease that was let go."""

    lease_id: int
    indices: tuple[int, ...]
    """Never empty."""
    reason: str
    was_running: bool
    """The engine still samples for it, until it is told."""


@dataclass(slots=True, kw_only=True)
class _Held:
    lease: Lease
    pending: set[int]
    due_at: float
    running: bool = False
    version: int = 0
    """By which it runs."""
    moving: bool = False
    """The engine was told to stop, to go on by a newer version."""
    deaths: int = 0


class HeldLeases:
    """Leases go in by `take`; they leave as their last rollout is finished, or by whatever returns `Unfinished`."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    @property
    def leases(self) -> tuple[Lease, ...]:
        """In the order in which they were taken."""
        return tuple(held.lease for held in self._held.values())

    @property
    def num_rollouts(self) -> int:
        """Leased and unfinished."""
        return sum(len(held.pending) for held in self._held.values())

    @property
    def most_tokens(self) -> int:
        """That the unfinished rollouts may have in the end, all of them together."""
        return sum(len(held.pending) * held.lease.max_tokens for held in self._held.values())

    @property
    def versions(self) -> frozenset[int]:
        """Policy versions that are needed: those that leases run by, and those that others can begin by alone."""
        return frozenset(
            held.version if held.running else held.lease.policy_version
            for held in self._held.values()
            if held.running or held.lease.on_new_version == "finish"
        )

    @property
    def any_running(self) -> bool:
        """Whether the engine samples for one of them."""
        return any(held.running for held in self._held.values())

    def holds(self, lease_id: int) -> bool:
        return lease_id in self._held

    def renew(self, lease: Lease, now: float) -> bool:
        """Whether this lease is held already; its deadline then begins anew."""
        held = self._held.get(lease.lease_id)
        if held is None:
            return False
        held.due_at = now + lease.deadline_s
        return True

    def take(self, lease: Lease, pending: Set[int], now: float) -> None:
        """Holds a new lease, of which the indices `pending` are to be sampled: one at least."""
        assert pending and lease.lease_id not in self._held, "a new lease with something to do"
        self._held[lease.lease_id] = _Held(lease=lease, pending=set(pending), due_at=now + lease.deadline_s)

    def finish(self, lease_id: int, index: int) -> bool:
        """Whether this rollout was awaited; it no longer is."""
        held = self._held.get(lease_id)
        if held is None or index not in held.pending:
            return False
        held.pending.discard(index)
        if not held.pending:
            del self._held[lease_id]
        return True

    def start(self, version_for: Callable[[Lease], int | None]) -> list[GroupRequest]:
        """What the engine is to begin now, each by the version that there is for it; runs from here on."""
        suspects = [held for held in self._held.values() if held.deaths >= SUSPECT_DEATHS]
        ready = [
            (held, version)
            for held in suspects or self._held.values()
            if (version := version_for(held.lease)) is not None
        ]
        if suspects:
            ready = [] if self.any_running else ready[:1]
        started = [(held, version) for held, version in ready if not held.running]
        for held, version in started:
            held.running, held.version = True, version
        return [_request(held) for held, _ in started]

    def interruptible(self, version: int) -> list[tuple[Lease, frozenset[int]]]:
        """The leases that run by an older version than this and may go on by it, with what is unfinished of each."""
        return [
            (held.lease, frozenset(held.pending))
            for held in self._held.values()
            if held.running and not held.moving and held.version < version and held.lease.on_new_version == "interrupt"
        ]

    def move(self, lease_id: int) -> None:
        """The engine is told to stop sampling for this lease, which runs; once `stopped`, it begins anew."""
        self._held[lease_id].moving = True

    def is_moving(self, lease_id: int) -> bool:
        held = self._held.get(lease_id)
        return held is not None and held.moving

    def running_by(self, lease_id: int) -> int | None:
        """The version that the engine draws this lease by."""
        held = self._held.get(lease_id)
        return held.version if held is not None and held.running else None

    def stopped(self, lease_id: int) -> None:
        """The engine has given this lease up."""
        if lease_id in self._held:
            self._held[lease_id].running = self._held[lease_id].moving = False

    def engine_ended(self) -> None:
        """The engine is gone: none of the leases runs, and none is to blame."""
        for held in self._held.values():
            held.running = held.moving = False

    def engine_died(self, what: str) -> list[Unfinished]:
        """As `engine_ended`, and every lease that ran may have been the cause; those with too many deaths go."""
        suspects = [held for held in self._held.values() if held.running]
        self.engine_ended()
        for held in suspects:
            held.deaths += 1
        return [
            self._let_go(held, f"the sampling engine died {held.deaths} times on it: {what}")
            for held in suspects
            if held.deaths >= MAX_DEATHS
        ]

    def is_running(self, lease_id: int) -> bool:
        """Whether the engine samples for this lease."""
        held = self._held.get(lease_id)
        return held is not None and held.running

    def overdue(self, now: float) -> list[int]:
        """The leases that are past their deadline; what runs has as long again."""
        return [
            lease_id
            for lease_id, held in self._held.items()
            if now > held.due_at + (held.lease.deadline_s if held.running else 0.0)
        ]

    def let_go(self, lease_id: int, reason: str) -> list[Unfinished]:
        """Lets go of one lease; empty when it is not held."""
        held = self._held.get(lease_id)
        return [] if held is None else [self._let_go(held, reason)]

    def let_go_all(self, reason: str) -> list[Unfinished]:
        """Lets go of every lease."""
        return [self._let_go(held, reason) for held in list(self._held.values())]

    def _let_go(self, held: _Held, reason: str) -> Unfinished:
        del self._held[held.lease.lease_id]
        return Unfinished(
            lease_id=held.lease.lease_id,
            indices=tuple(sorted(held.pending)),
            reason=reason,
            was_running=held.running,
        )


def _request(held: _Held) -> GroupRequest:
    lease = held.lease
    return GroupRequest(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        indices=tuple(sorted(held.pending)),
        prompt_ids=lease.prompt_ids,
        seed=lease.seed,
        policy_version=held.version,
        temperature=lease.temperature,
        max_tokens=lease.max_tokens,
        stop_ids=lease.stop_ids,
    )
