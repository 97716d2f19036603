"""Records of this node's leases, until all rollouts of a lease are finished or given up.

This module only keeps records, and knows neither engine nor hub. Methods return the rollouts that were given up; the
caller must cancel and report them.

Invariants:
- Every rollout of a lease leaves once: by `finish`, or in one `Unfinished`.
- An interruptible lease runs with its own or any newer version; every other lease runs only with its own version.
- A lease on which the engine died `MAX_DEATHS` times is given up. Leases with `SUSPECT_DEATHS` deaths are sampled one
  at a time, so that a further death shows which lease causes it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from echo_node.core.policies import PolicyVersions
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import Lease

MAX_DEATHS: Final = 3
SUSPECT_DEATHS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Unfinished rollouts of a lease that was given up."""

    lease_id: int
    indices: tuple[int, ...]
    """Indices of the unfinished rollouts, at least one."""
    reason: str
    was_running: bool
    """True if the engine still samples the lease; the caller must then cancel the sampling."""


@dataclass(slots=True, kw_only=True)
class _Held:
    lease: Lease
    pending: set[int]
    due_at: float
    running: bool = False
    version: int = 0
    """Policy version with which the engine samples the lease."""
    moving: bool = False
    """True while the engine stops the lease, so that a newer version or another engine can continue it."""
    deaths: int = 0


class HeldLeases:
    """The leases of this node. `take` adds a lease. It is removed when its last rollout is finished, or when the node
    gives it up and returns an `Unfinished`.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self.num_rollouts = 0
        """Number of unfinished rollouts."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Held leases, oldest first."""
        return tuple(held.lease for held in self._held.values())

    @property
    def most_tokens(self) -> int:
        """Sum of the maximum lengths of all unfinished rollouts, in tokens."""
        return sum(len(held.pending) * held.lease.max_tokens for held in self._held.values())

    @property
    def versions(self) -> frozenset[int]:
        """Policy versions with which leases run, and those for which leases wait."""
        return frozenset(
            held.version if held.running else held.lease.policy_version
            for held in self._held.values()
            if held.running or held.lease.on_new_version == "finish"
        )

    @property
    def any_running(self) -> bool:
        return any(held.running for held in self._held.values())

    def holds(self, lease_id: int) -> bool:
        return lease_id in self._held

    def renew(self, lease: Lease, now: float) -> bool:
        """Restart the deadline of a held lease. Return False if the lease is not held."""
        held = self._held.get(lease.lease_id)
        if held is None:
            return False
        held.due_at = now + lease.deadline_s
        return True

    def take(self, lease: Lease, pending: Set[int], now: float) -> None:
        """Add a new lease with the unfinished rollouts `pending`, at least one."""
        assert pending and lease.lease_id not in self._held, "a new lease has rollouts to sample"
        self._held[lease.lease_id] = _Held(lease=lease, pending=set(pending), due_at=now + lease.deadline_s)
        self.num_rollouts += len(pending)

    def finish(self, lease_id: int, index: int) -> bool:
        """Record a finished rollout. Return False if no held lease waits for it."""
        held = self._held.get(lease_id)
        if held is None or index not in held.pending:
            return False
        held.pending.discard(index)
        self.num_rollouts -= 1
        if not held.pending:
            del self._held[lease_id]
        return True

    def start(self, policies: PolicyVersions) -> list[GroupRequest]:
        """Return the groups that the engine should start now, and mark their leases as running."""
        suspects = [held for held in self._held.values() if held.deaths >= SUSPECT_DEATHS]
        ready = [
            (held, version)
            for held in suspects or self._held.values()
            if (version := policies.version_for(held.lease)) is not None
        ]
        if suspects:
            ready = [] if self.any_running else ready[:1]
        started = [(held, version) for held, version in ready if not held.running]
        for held, version in started:
            held.running, held.version = True, version
        return [_request(held) for held, _ in started]

    def interruptible(self, version: int) -> list[tuple[Lease, frozenset[int]]]:
        """Return the running leases that may continue with this newer version, with their unfinished indices."""
        return [
            (held.lease, frozenset(held.pending))
            for held in self._held.values()
            if held.running and not held.moving and held.version < version and held.lease.on_new_version == "interrupt"
        ]

    def move(self, lease_id: int) -> None:
        """Mark a running lease as moving: the engine is stopping the lease, which may start again after `stopped`."""
        self._held[lease_id].moving = True

    def is_moving(self, lease_id: int) -> bool:
        held = self._held.get(lease_id)
        return held is not None and held.moving

    def running_by(self, lease_id: int) -> int | None:
        """Return the version with which the lease runs; None = it does not run."""
        held = self._held.get(lease_id)
        return held.version if held is not None and held.running else None

    def stopped(self, lease_id: int) -> None:
        if lease_id in self._held:
            self._held[lease_id].running = self._held[lease_id].moving = False

    def engine_ended(self) -> None:
        """Record that no lease runs any more, without counting a death for any lease."""
        for held in self._held.values():
            held.running = held.moving = False

    def engine_died(self, what: str) -> list[Unfinished]:
        """Record that no lease runs any more, and count a death for each lease that ran. Give up leases with too many
        deaths.
        """
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
        held = self._held.get(lease_id)
        return held is not None and held.running

    def overdue(self, now: float) -> list[int]:
        """Return the leases past their deadline. For a lease that the engine samples, the deadline is twice as far
        away.
        """
        return [
            lease_id
            for lease_id, held in self._held.items()
            if now > held.due_at + (held.lease.deadline_s if held.running else 0.0)
        ]

    def let_go(self, lease_id: int, reason: str) -> list[Unfinished]:
        """Give up one lease. Return [] if it is not held."""
        held = self._held.get(lease_id)
        return [] if held is None else [self._let_go(held, reason)]

    def let_go_all(self, reason: str) -> list[Unfinished]:
        return [self._let_go(held, reason) for held in list(self._held.values())]

    def _let_go(self, held: _Held, reason: str) -> Unfinished:
        del self._held[held.lease.lease_id]
        self.num_rollouts -= len(held.pending)
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
