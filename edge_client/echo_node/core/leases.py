"""The leases of a node, until all their rollouts are finished, returned or revoked.

This module joins the held leases (`held`) with their tokens (`drawn`), and returns messages for the hub and for the
engines, which are named by their devices.

Invariants:
- Every index of an accepted lease is finished once, returned once, or revoked by the hub.
- The hub gets each token of an unfinished rollout once per connection. A connected hub gets all reported tokens of a
  lease before the lease is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import assert_never

from echo_node.core.drawn import DrawnByLease
from echo_node.core.effects import CancelLease, Effect, ForgetLease, SpoolLease, SubmitGroup
from echo_node.core.engine_life import Blame
from echo_node.core.held import HeldLeases, Unfinished
from echo_node.core.hub_talk import HubTalk
from echo_node.core.placing import Seats
from echo_node.core.policies import PolicyVersions
from echo_shared.sampling.interface import DrawnPart, FinishedRollout
from echo_shared.wire.messages import MAX_VERSION_SPANS, Lease, LeaseReturned, Rollout


@dataclass(slots=True)
class _Leaving:
    """A lease on its way back to the hub. The node waits for the last tokens of its engines."""

    reason: str
    by: float
    """Deadline in monotonic time: the lease is then returned even without the engines' last tokens."""


class Leases:
    """All leases of the node. Methods return effects, which `echo_node.shell` carries out."""

    def __init__(self, talk: HubTalk) -> None:
        self._talk = talk
        self._held = HeldLeases()
        self._drawn = DrawnByLease()
        self._leaving: dict[int, _Leaving] = {}
        """Leases to return to the hub once the engines have reported their last tokens."""

    @property
    def held(self) -> tuple[Lease, ...]:
        return self._held.leases

    @property
    def num_rollouts(self) -> int:
        return self._held.num_rollouts

    @property
    def most_tokens(self) -> int:
        return self._held.most_tokens

    @property
    def num_held_tokens(self) -> int:
        return self._drawn.num_held_tokens

    @property
    def num_drawn_tokens(self) -> int:
        """Tokens drawn by this node, including those of dropped rollouts."""
        return self._drawn.num_tokens

    @property
    def num_finished(self) -> int:
        return self._drawn.num_finished

    @property
    def versions(self) -> frozenset[int]:
        return self._held.versions

    @property
    def any_running(self) -> bool:
        return self._held.any_running

    @property
    def any_leaving(self) -> bool:
        """True if a lease waits for an engine's last tokens before it goes back to the hub."""
        return bool(self._leaving)

    def num_on(self, device: str) -> int:
        """Return the number of rollouts that the engine of this device samples."""
        return self._held.num_by_device[device]

    @property
    def num_by_device(self) -> Mapping[str, int]:
        """Number of rollouts that engines sample, by device; 0 for a missing device."""
        return self._held.num_by_device

    def awaits(self, device: str) -> bool:
        """Return True if the engine of this device still has to report tokens of a lease that it was told to stop."""
        return self._held.is_stopping(device)

    def renew(self, lease: Lease, now: float) -> bool:
        return self._held.renew(lease, now)

    def take(self, lease: Lease, pending: Set[int], now: float) -> list[Effect]:
        self._held.take(lease, pending, now)
        self._drawn.begin(lease, pending)
        return [SpoolLease(lease_id=lease.lease_id, indices=tuple(sorted(pending)))]

    def revoked(self, lease_id: int) -> list[Effect]:
        self._leaving.pop(lease_id, None)
        effects: list[Effect] = []
        for unfinished in self._held.let_go(lease_id, "the hub has revoked it"):
            self._drawn.forget(lease_id)
            effects += [*_cancel(unfinished), ForgetLease(lease_id=lease_id)]
        return effects

    def replaced(self, versions: Set[int]) -> list[Effect]:
        """Return to the hub all leases with tokens of any of `versions`: other content was published under these
        versions, so the tokens are invalid.
        """
        effects: list[Effect] = []
        for lease in self._held.leases if versions else ():
            drawn_by = self._held.versions_on(lease.lease_id) | self._drawn.versions(lease.lease_id)
            if found := versions & drawn_by:
                self._drawn.forget(lease.lease_id)
                effects += self.give_up(lease.lease_id, f"policy version {max(found)} has been replaced")
        return effects

    def connected(self) -> None:
        """Mark all tokens as unsent: a disconnected hub may have lost some. The next call of `drawn` sends them."""
        self._drawn.connected()

    def drawn(self, parts: Iterable[DrawnPart], *, device: str = "", for_hub: bool = True) -> list[Effect]:
        """Store the tokens that an engine has reported. `for_hub`: send these tokens, and all earlier unsent ones, to
        the hub.
        """
        for part in parts:
            if self._held.runs_on(part.lease_id, part.index, device):
                self._drawn.add(part)
        return self._send_drawn() if for_hub else []

    def finished(self, finished: FinishedRollout, *, device: str = "") -> Rollout | None:
        """Return the finished rollout to store and send; None if its lease was revoked or returned in the meantime, or
        if another engine samples the rollout now.
        """
        if not self._held.runs_on(finished.lease_id, finished.index, device):
            return None
        self._held.finish(finished.lease_id, finished.index)
        return self._drawn.end(finished)

    def cancelled(self, lease_id: int, *, device: str = "") -> list[Effect]:
        """Handle an engine's confirmation that it stopped this lease."""
        self._held.confirmed(lease_id, device)
        return [] if self._held.devices(lease_id) else self._return_waiting(lease_id)

    def failed(self, lease_id: int, what: str, *, device: str = "", is_of_version: bool = False) -> list[Effect]:
        """Return to the hub a lease that an engine cannot sample. `is_of_version`: True if the lease's policy version
        is the cause.
        """
        versions = self._held.versions_on(lease_id, device) if is_of_version else set()
        self._leaving.pop(lease_id, None)
        self._held.stopped(lease_id, device)
        return self._return(self._held.let_go(lease_id, what), unusable_version=max(versions, default=None))

    def engine_lost(self, what: str, blame: Blame, *, device: str = "", is_only: bool = True) -> list[Effect]:
        """Handle the end or the failed start of an engine. `is_only`: no other engine is up."""
        alone = [lease_id for lease_id in self._leaving if self._held.devices(lease_id) <= {device}]
        effects = [effect for lease_id in alone for effect in self._return_waiting(lease_id)]
        match blame:
            case "nobody":
                self._held.engine_ended(device)
            case "the start":
                self._held.engine_ended(device)
                if is_only:
                    effects += self._return(self._held.let_go_all(f"the sampling engine does not start: {what}"))
            case "the work":
                effects += self._return(self._held.engine_died(device, what))
            case _:
                assert_never(blame)
        return effects

    def is_held(self, lease_id: int) -> bool:
        return self._held.holds(lease_id)

    def is_of_tenant(self, lease_id: int) -> bool:
        """Return True for a held lease of a tenant's adapter."""
        return self._held.is_of_tenant(lease_id)

    def start(self, policies: PolicyVersions, engines: Sequence[Seats], *, testing: str = "") -> list[Effect]:
        """Submit waiting rollouts to engines with capacity and the right version. Known tokens become the prefix.
        `testing`: see `HeldLeases.start`.
        """
        return [
            SubmitGroup(
                request=replace(request, prefixes=self._drawn.prefixes(request.lease_id, request.indices)),
                device=placed.device,
            )
            for placed in self._held.start(policies, engines, testing=testing)
            for request in (placed.request,)
        ]

    def behind(self, version: int, device: str = "") -> list[tuple[Lease, tuple[int, ...]]]:
        """Return the leases on this device that may continue with this newer version, each with the lengths of its
        unfinished rollouts there.
        """
        return [
            (lease, tuple(self._drawn.num_drawn(lease.lease_id, index) for index in pending))
            for lease, pending in self._held.interruptible(version, device)
            if lease.lease_id not in self._leaving and len(self._drawn.versions(lease.lease_id)) < MAX_VERSION_SPANS
        ]

    def move(self, leases: Iterable[Lease], device: str = "") -> list[Effect]:
        """Make an engine stop running leases. Their rollouts start again later, with their tokens so far as prefix."""
        return [self._move(lease.lease_id, device) for lease in leases]

    def move_all(self, device: str = "") -> list[Effect]:
        """Make an engine stop all its leases, so that another engine continues them."""
        return [self._move(lease_id, device) for lease_id, _ in self._held.running_on(device)]

    def hand_over(self, device: str, room: int, reason: str, *, by: float) -> list[Effect]:
        """Make an engine stop all its leases. Other engines continue at most `room` rollouts; the remaining leases go
        back to the hub, like in `give_back_all`.
        """
        effects: list[Effect] = []
        for lease_id, count in self._held.running_on(device):
            if count <= room:
                room -= count
                effects.append(self._move(lease_id, device))
            else:
                effects += self._give_back([lease_id], reason, by=by)
        return effects

    def abandon(self, device: str) -> None:
        """Let the rollouts that an engine should have stopped start on another engine, without the first engine's last
        tokens.
        """
        self._held.abandon(device)

    def _move(self, lease_id: int, device: str) -> Effect:
        self._held.stop_on(lease_id, device)
        return CancelLease(lease_id=lease_id, device=device)

    def give_up(self, lease_id: int, reason: str) -> list[Effect]:
        """Return a held lease to the hub now, without waiting for the engines' last tokens."""
        return self._return(self._held.let_go(lease_id, reason))

    def give_back_all(self, reason: str, *, by: float) -> list[Effect]:
        """Return all leases to the hub. While the hub is connected, running leases wait for the engines' last tokens,
        until `by` at most.
        """
        return self._give_back([lease.lease_id for lease in self._held.leases], reason, by=by)

    def give_back_overdue(self, now: float, *, by: float) -> list[Effect]:
        """Return to the hub all leases past their deadline, like `give_back_all`."""
        return self._give_back(self._held.overdue(now), "its deadline has passed", by=by)

    def leave(self, now: float) -> list[Effect]:
        """Return to the hub the leases that have waited too long for the engine's last tokens."""
        overdue = [lease_id for lease_id, leaving in self._leaving.items() if now >= leaving.by]
        return [effect for lease_id in overdue for effect in self._return_waiting(lease_id)]

    def _give_back(self, lease_ids: Iterable[int], reason: str, *, by: float) -> list[Effect]:
        effects: list[Effect] = []
        for lease_id in lease_ids:
            if lease_id in self._leaving:
                self._leaving[lease_id].by = min(self._leaving[lease_id].by, by)
            elif self._talk.connected and self._held.devices(lease_id):
                self._leaving[lease_id] = _Leaving(reason, by)
                effects += [CancelLease(lease_id=lease_id, device=device) for device in self._held.stop(lease_id)]
            else:
                effects += self.give_up(lease_id, reason)
        return effects

    def _return_waiting(self, lease_id: int) -> list[Effect]:
        """Return a lease to the hub if it waited for the engines' last tokens."""
        leaving = self._leaving.pop(lease_id, None)
        return [] if leaving is None else self.give_up(lease_id, leaving.reason)

    def _return(self, let_go: Sequence[Unfinished], *, unusable_version: int | None = None) -> list[Effect]:
        effects = self._send_drawn() if let_go else []
        for unfinished in let_go:
            self._drawn.forget(unfinished.lease_id)
            effects += _cancel(unfinished)
            effects += self._talk.say(
                LeaseReturned(
                    lease_id=unfinished.lease_id,
                    indices=unfinished.indices,
                    reason=unfinished.reason,
                    unusable_version=unusable_version,
                )
            )
        return effects

    def _send_drawn(self) -> list[Effect]:
        if not self._talk.connected:
            return []
        return [effect for message in self._drawn.take_unsent() for effect in self._talk.send(message)]


def _cancel(unfinished: Unfinished) -> list[Effect]:
    return [CancelLease(lease_id=unfinished.lease_id, device=device) for device in unfinished.running_on]
