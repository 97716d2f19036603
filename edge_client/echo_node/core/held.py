"""Records of this node's leases, until all rollouts of a lease are finished or given up.

This module only keeps records, and knows neither engine nor hub. Methods return the rollouts that were given up; the
caller must cancel and report them.

Invariants:
- Every rollout of a lease leaves once: by `finish`, or in one `Unfinished`.
- Every unfinished rollout waits, or runs on one engine. Engines are named by their devices. An engine that was told to
  stop a lease gets rollouts of this lease again only after it has confirmed the stop.
- An interruptible lease runs with its own or any newer version; every other lease runs only with its own version.
- A lease on which engines died `MAX_DEATHS` times is given up. Leases with `SUSPECT_DEATHS` deaths are sampled one at a
  time, on an engine that runs nothing else, so that a further death shows which lease causes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from echo_node.core.placing import Seats, place
from echo_node.core.policies import PolicyVersions
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import Lease
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

MAX_DEATHS: Final = 3
SUSPECT_DEATHS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Unfinished rollouts of a lease that was given up."""

    lease_id: int
    indices: tuple[int, ...]
    """Indices of the unfinished rollouts, at least one."""
    reason: str
    running_on: tuple[str, ...]
    """Devices of engines that sample the lease and got no order to stop; the caller must tell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A group that an engine should start now."""

    device: str
    request: GroupRequest


@dataclass(frozen=True, slots=True)
class _Run:
    """The engine that samples a rollout, by its device, and the policy version with which it samples."""

    device: str
    version: int


@dataclass(slots=True, kw_only=True)
class _Held:
    lease: Lease
    pending: set[int]
    due_at: float
    runs: dict[int, _Run] = field(default_factory=dict)
    """Rollouts that an engine samples, by index. All other pending rollouts wait."""
    stopping: set[str] = field(default_factory=set)
    """Devices whose engines were told to stop the lease, and have not confirmed it."""
    is_leaving: bool = False
    """True if the lease was stopped in order to be given up: none of its rollouts starts again."""
    deaths: int = 0

    @property
    def devices(self) -> set[str]:
        return {run.device for run in self.runs.values()}

    @property
    def versions(self) -> set[int]:
        return {run.version for run in self.runs.values()}

    @property
    def waiting(self) -> list[int]:
        return sorted(self.pending - self.runs.keys())

    def on(self, device: str) -> set[int]:
        """Return the rollouts that the engine of this device samples."""
        return {index for index, run in self.runs.items() if run.device == device}


class HeldLeases:
    """The leases of this node. `take` adds a lease. A lease is removed when its last rollout is finished, or when the
    node gives up the lease and returns an `Unfinished`.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self.num_rollouts = 0
        """Number of unfinished rollouts of all held leases."""
        self.num_by_device: Counter[str] = Counter()
        """Number of running rollouts by device."""

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
        found: set[int] = set()
        for held in self._held.values():
            found |= held.versions
            if held.lease.on_new_version == "finish" and len(held.runs) < len(held.pending):
                found.add(held.lease.policy_version)
        return frozenset(found)

    @property
    def any_running(self) -> bool:
        return self.num_by_device.total() > 0

    def devices(self, lease_id: int) -> set[str]:
        """Return the devices whose engines sample the lease."""
        held = self._held.get(lease_id)
        return set() if held is None else held.devices

    def holds(self, lease_id: int) -> bool:
        return lease_id in self._held

    def is_of_tenant(self, lease_id: int) -> bool:
        """Return True for a held lease of a tenant's adapter."""
        held = self._held.get(lease_id)
        return held is not None and held.lease.policy_version >= FIRST_TENANT_VERSION

    def renew(self, lease: Lease, now: float) -> bool:
        """Restart the deadline of a lease that the hub has sent again. Return False if the node does not hold the
        lease.
        """
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

    def runs_on(self, lease_id: int, index: int, device: str) -> bool:
        """Return True if the engine of this device samples the rollout. If not, the engine's report about the rollout
        came late and must be ignored.
        """
        held = self._held.get(lease_id)
        run = None if held is None else held.runs.get(index)
        return run is not None and run.device == device

    def finish(self, lease_id: int, index: int) -> bool:
        """Record a finished rollout. Return False if no held lease waits for it."""
        held = self._held.get(lease_id)
        if held is None or index not in held.pending:
            return False
        self._stop(held, {index})
        held.pending.discard(index)
        self.num_rollouts -= 1
        if not held.pending:
            del self._held[lease_id]
        return True

    def start(self, policies: PolicyVersions, engines: Sequence[Seats], *, testing: str = "") -> list[Placed]:
        """Return the groups of waiting rollouts that the engines should start now, and mark these rollouts as running.

        A suspect is a lease on which engines have died. Only the engine of device `testing` samples suspects, unless
        one already runs on another device.
        """
        for engine in engines:
            engine.taken = self.num_by_device[engine.device]
        suspects = [held for held in self._held.values() if held.deaths >= SUSPECT_DEATHS]
        if not suspects:
            return [placed for held in self._held.values() for placed in self._start(held, policies, engines)]
        testing = next((device for held in suspects for device in held.devices), testing)
        others = [engine for engine in engines if engine.device != testing]
        usual = (held for held in self._held.values() if held.deaths < SUSPECT_DEATHS)
        placed = [placed for held in usual for placed in self._start(held, policies, others)]
        alone = [engine for engine in engines if engine.device == testing and not engine.taken]
        waiting = (held for held in suspects if not held.runs)
        return placed + next((found for held in waiting if (found := self._start(held, policies, alone))), [])

    def _start(self, held: _Held, policies: PolicyVersions, engines: Iterable[Seats]) -> list[Placed]:
        if held.is_leaving or len(held.runs) == len(held.pending):
            return []
        waiting = held.waiting
        versions = {
            engine.device: version
            for engine in engines
            if engine.device not in held.stopping
            and (version := policies.version_for(held.lease, engine.device)) is not None
        }
        requests = []
        for engine, count in place(len(waiting), (engine for engine in engines if engine.device in versions)):
            device, indices, waiting = engine.device, waiting[:count], waiting[count:]
            held.runs |= dict.fromkeys(indices, _Run(device, versions[device]))
            self.num_by_device[device] += count
            requests.append(Placed(device=device, request=_request(held.lease, indices, versions[device])))
        return requests

    def interruptible(self, version: int, device: str) -> list[tuple[Lease, frozenset[int]]]:
        """Return the leases on this device that may continue with this newer version, with their unfinished indices
        there.
        """
        return [
            (held.lease, frozenset(indices))
            for held in self._held.values()
            if held.lease.on_new_version == "interrupt" and device not in held.stopping
            if (indices := held.on(device)) and min(held.runs[index].version for index in indices) < version
        ]

    def running_on(self, device: str) -> list[tuple[int, int]]:
        """Return the running leases of this device, each with its number of rollouts on the device. Leases that are
        stopping are left out.
        """
        return [
            (lease_id, len(indices))
            for lease_id, held in self._held.items()
            if device not in held.stopping and (indices := held.on(device))
        ]

    def stop(self, lease_id: int) -> list[str]:
        """Stop a lease for good: its rollouts do not start again. Return the devices whose engines must be told. The
        caller gives the lease up later (`let_go`).
        """
        held = self._held[lease_id]
        held.is_leaving = True
        told = sorted(held.devices - held.stopping)
        held.stopping |= held.devices
        return told

    def stop_on(self, lease_id: int, device: str) -> None:
        """Mark a lease as stopping on one engine. Its rollouts there may start again after `stopped`."""
        self._held[lease_id].stopping.add(device)

    def is_stopping(self, device: str) -> bool:
        """Return True if the engine of this device still has to report tokens of a lease that it was told to stop."""
        return any(device in held.stopping and held.on(device) for held in self._held.values())

    def versions_on(self, lease_id: int, device: str | None = None) -> set[int]:
        """Return the versions with which the lease runs on this device; None = on all devices."""
        held = self._held.get(lease_id)
        runs = () if held is None else held.runs.values()
        return {run.version for run in runs if device in (None, run.device)}

    def confirmed(self, lease_id: int, device: str) -> None:
        """Record the confirmation of an engine that was told to stop the lease. Its rollouts wait again."""
        held = self._held.get(lease_id)
        if held is not None and device in held.stopping:
            self.stopped(lease_id, device)

    def stopped(self, lease_id: int, device: str) -> None:
        """Record that the engine of this device samples the lease no longer. Its rollouts wait again."""
        if (held := self._held.get(lease_id)) is not None:
            held.stopping.discard(device)
            self._stop(held, held.on(device))

    def abandon(self, device: str) -> list[int]:
        """Let rollouts that an engine should have stopped wait again, although it has not confirmed the stop. Return
        the ids of their leases.
        """
        found = [held for held in self._held.values() if device in held.stopping and held.on(device)]
        for held in found:
            self._stop(held, held.on(device))
        return [held.lease.lease_id for held in found]

    def engine_ended(self, device: str) -> None:
        """Record that no lease runs on this device any more, without counting a death for any lease."""
        for held in self._held.values():
            held.stopping.discard(device)
            self._stop(held, held.on(device))

    def engine_died(self, device: str, what: str) -> list[Unfinished]:
        """Record a crash of this device's engine: its leases stop, and each counts one death. Give up leases with too
        many deaths.
        """
        suspects = [held for held in self._held.values() if device in held.devices]
        self.engine_ended(device)
        for held in suspects:
            held.deaths += 1
        return [
            self._let_go(held, f"the sampling engine died {held.deaths} times on it: {what}")
            for held in suspects
            if held.deaths >= MAX_DEATHS
        ]

    def overdue(self, now: float) -> list[int]:
        """Return the leases past their deadline. For a lease that an engine samples, the deadline is twice as far
        away.
        """
        return [
            lease_id
            for lease_id, held in self._held.items()
            if now > held.due_at + (held.lease.deadline_s if held.runs else 0.0)
        ]

    def let_go(self, lease_id: int, reason: str) -> list[Unfinished]:
        """Give up one lease, for this reason. Return its unfinished rollouts, or [] if the lease is not held."""
        held = self._held.get(lease_id)
        return [] if held is None else [self._let_go(held, reason)]

    def let_go_all(self, reason: str) -> list[Unfinished]:
        return [self._let_go(held, reason) for held in list(self._held.values())]

    def _let_go(self, held: _Held, reason: str) -> Unfinished:
        running_on = tuple(sorted(held.devices - held.stopping))
        self._stop(held, set(held.runs))
        del self._held[held.lease.lease_id]
        self.num_rollouts -= len(held.pending)
        return Unfinished(
            lease_id=held.lease.lease_id,
            indices=tuple(sorted(held.pending)),
            reason=reason,
            running_on=running_on,
        )

    def _stop(self, held: _Held, indices: Iterable[int]) -> None:
        for index in indices:
            if (run := held.runs.pop(index, None)) is not None:
                self.num_by_device[run.device] -= 1


def _request(lease: Lease, indices: Collection[int], version: int) -> GroupRequest:
    return GroupRequest(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        indices=tuple(indices),
        prompt_ids=lease.prompt_ids,
        seed=lease.seed,
        policy_version=version,
        temperature=lease.temperature,
        max_tokens=lease.max_tokens,
        stop_ids=lease.stop_ids,
        returns_routes=lease.returns_routes,
        keep_keys=lease.keep_keys,
    )
