"""The leases of a node, until all their rollouts are finished, returned or revoked.

This module joins the held leases (`held`) with their tokens (`drawn`), and returns messages for the engine and the hub.

Invariants:
- Every index of an accepted lease is finished once, returned once, or revoked by the hub.
- The hub gets each token of an unfinished rollout once per connection. A connected hub gets all reported tokens of a
  lease before the lease is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import assert_never

from echo_node.core.drawn import DrawnByLease
from echo_node.core.effects import CancelLease, Effect, ForgetLease, SpoolLease, SubmitGroup
from echo_node.core.engine_life import Blame
from echo_node.core.held import HeldLeases, Unfinished
from echo_node.core.hub_talk import HubTalk
from echo_node.core.policies import PolicyVersions
from echo_shared.sampling.interface import DrawnPart, FinishedRollout
from echo_shared.wire.messages import MAX_VERSION_SPANS, Lease, LeaseReturned, Rollout


@dataclass(slots=True)
class _Leaving:
    """A lease that goes back to the hub. The engine was told to cancel the lease, and still has to report the lease's
    last tokens.
    """

    reason: str
    by: float
    """Time at which the lease is returned even without the engine's last tokens."""


class Leases:
    """All leases of the node. Methods return effects, which `echo_node.shell` carries out."""

    def __init__(self, talk: HubTalk) -> None:
        self._talk = talk
        self._held = HeldLeases()
        self._drawn = DrawnByLease()
        self._leaving: dict[int, _Leaving] = {}
        """Leases to return to the hub once the engine has reported their last tokens."""

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
        """True if a lease waits for the engine's last tokens before it goes back to the hub."""
        return bool(self._leaving)

    def renew(self, lease: Lease, now: float) -> bool:
        return self._held.renew(lease, now)

    def take(self, lease: Lease, pending: Set[int], now: float) -> list[Effect]:
        self._held.take(lease, pending, now)
        self._drawn.begin(lease, pending)
        return [SpoolLease(lease_id=lease.lease_id, indices=tuple(sorted(pending)))]

    def revoked(self, lease_id: int) -> list[Effect]:
        if self._leaving.pop(lease_id, None) is not None:
            self._held.stopped(lease_id)
        effects: list[Effect] = []
        for unfinished in self._held.let_go(lease_id, "the hub has revoked it"):
            self._drawn.forget(lease_id)
            effects += [*_cancel(unfinished), ForgetLease(lease_id=lease_id)]
        return effects

    def replaced(self, versions: Set[int]) -> list[Effect]:
        """Return leases with tokens of any of `versions` to the hub: other content was published under these versions,
        so the tokens are invalid.
        """
        effects: list[Effect] = []
        for lease in self._held.leases if versions else ():
            drawn_by = {self._held.running_by(lease.lease_id)} | self._drawn.versions(lease.lease_id)
            if found := versions & drawn_by:
                self._drawn.forget(lease.lease_id)
                effects += self.give_up(lease.lease_id, f"policy version {max(found)} has been replaced")
        return effects

    def connected(self) -> list[Effect]:
        """Send all tokens again: a disconnected hub may have lost some."""
        self._drawn.connected()
        return self._send_drawn()

    def drawn(self, parts: Iterable[DrawnPart], *, for_hub: bool = True) -> list[Effect]:
        """Store the engine's report. `for_hub`: send these tokens, and all earlier unsent ones, to the hub."""
        for part in parts:
            self._drawn.add(part)
        return self._send_drawn() if for_hub else []

    def finished(self, finished: FinishedRollout) -> Rollout | None:
        """Return the finished rollout to store and send; None if its lease was revoked or returned in the meantime."""
        if not self._held.finish(finished.lease_id, finished.index):
            return None
        return self._drawn.end(finished)

    def cancelled(self, lease_id: int) -> list[Effect]:
        """Handle the engine's confirmation that it stopped this lease."""
        if self._held.is_moving(lease_id):
            self._held.stopped(lease_id)
        return self._return_waiting(lease_id)

    def failed(self, lease_id: int, what: str, *, is_of_version: bool = False) -> list[Effect]:
        """Return a lease that the engine cannot sample to the hub. `is_of_version`: True if the lease's policy version
        is the cause.
        """
        unusable = self._held.running_by(lease_id) if is_of_version else None
        self._leaving.pop(lease_id, None)
        self._held.stopped(lease_id)
        return self._return(self._held.let_go(lease_id, what), unusable_version=unusable)

    def engine_lost(self, what: str, blame: Blame) -> list[Effect]:
        """Handle the end or the failed start of the engine."""
        effects = [effect for lease_id in list(self._leaving) for effect in self._return_waiting(lease_id)]
        match blame:
            case "nobody":
                self._held.engine_ended()
            case "the start":
                effects += self._return(self._held.let_go_all(f"the sampling engine does not start: {what}"))
            case "the work":
                effects += self._return(self._held.engine_died(what))
            case _:
                assert_never(blame)
        return effects

    def is_held(self, lease_id: int) -> bool:
        return self._held.holds(lease_id)

    def start(self, policies: PolicyVersions) -> list[Effect]:
        """Submit the leases whose version is available, each rollout with its tokens so far as prefix."""
        return [
            SubmitGroup(request=replace(request, prefixes=self._drawn.prefixes(request.lease_id, request.indices)))
            for request in self._held.start(policies)
        ]

    def behind(self, version: int) -> list[tuple[Lease, tuple[int, ...]]]:
        """Return the running leases that may continue with this newer version, each with the lengths of its unfinished
        rollouts.
        """
        return [
            (lease, tuple(self._drawn.num_drawn(lease.lease_id, index) for index in pending))
            for lease, pending in self._held.interruptible(version)
            if lease.lease_id not in self._leaving and len(self._drawn.versions(lease.lease_id)) < MAX_VERSION_SPANS
        ]

    def move(self, leases: Iterable[Lease]) -> list[Effect]:
        """Make the engine stop running leases. These start again later, with their tokens so far as prefix."""
        lease_ids = [lease.lease_id for lease in leases]
        for lease_id in lease_ids:
            self._held.move(lease_id)
        return [CancelLease(lease_id=lease_id) for lease_id in lease_ids]

    def move_all(self) -> list[Effect]:
        """Make the engine stop all running leases, so that another engine continues them."""
        return self.move(
            lease
            for lease in self._held.leases
            if self._held.is_running(lease.lease_id)
            and not (lease.lease_id in self._leaving or self._held.is_moving(lease.lease_id))
        )

    def give_up(self, lease_id: int, reason: str) -> list[Effect]:
        """Return a held lease to the hub now, without waiting for the engine's last tokens."""
        return self._return(self._held.let_go(lease_id, reason))

    def give_back_all(self, reason: str, *, by: float) -> list[Effect]:
        """Return all leases to the hub. While the hub is connected, running leases wait for the engine's last tokens,
        until `by` at most.
        """
        return self._give_back([lease.lease_id for lease in self._held.leases], reason, by=by)

    def give_back_overdue(self, now: float, *, by: float) -> list[Effect]:
        """Return leases past their deadline to the hub, like `give_back_all`."""
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
            elif self._talk.connected and self._held.is_running(lease_id):
                self._leaving[lease_id] = _Leaving(reason, by)
                effects.append(CancelLease(lease_id=lease_id))
            else:
                effects += self.give_up(lease_id, reason)
        return effects

    def _return_waiting(self, lease_id: int) -> list[Effect]:
        """Return a lease to the hub if it waited for the engine's last tokens."""
        leaving = self._leaving.pop(lease_id, None)
        if leaving is None:
            return []
        self._held.stopped(lease_id)
        return self.give_up(lease_id, leaving.reason)

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
    return [CancelLease(lease_id=unfinished.lease_id)] if unfinished.was_running else []
