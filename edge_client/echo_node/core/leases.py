"""The leases of a node, from when they are taken until each of their rollouts is finished, returned or revoked.

It joins the leases held (`held`) with what is drawn of them (`drawn`), and returns what the engine and the hub are to
be told of both.

Invariants:
- every index of a lease that is taken is finished once, is returned once, or was revoked by the hub;
- the hub is sent what unfinished rollouts have drawn, once a connection, and before their lease is returned all that
  the engine has told of them, if there is a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import assert_never

from echo_node.core.drawn import Drawn, as_rollout
from echo_node.core.effects import CancelLease, Effect, ForgetLease, SpoolLease, SubmitGroup
from echo_node.core.engine_life import Blame
from echo_node.core.held import HeldLeases, Unfinished
from echo_node.core.hub_talk import HubTalk
from echo_shared.messages import MAX_VERSION_SPANS, Lease, LeaseReturned, Rollout
from echo_shared.sampling import DrawnPart, FinishedRollout


@dataclass(slots=True)
class _Leaving:
    """A lease that the engine was told to cancel."""

    reason: str
    by: float
    """When it goes back without an answer."""


class Leases:
    """Told what becomes of them; every method returns what is to be done for it."""

    def __init__(self, talk: HubTalk) -> None:
        """What the hub is told goes through `talk`."""
        self._talk = talk
        self._held = HeldLeases()
        self._drawn = Drawn()
        self._leaving: dict[int, _Leaving] = {}
        """Those that go back once the engine has told what it drew of them."""

    @property
    def held(self) -> tuple[Lease, ...]:
        """In the order in which they were taken."""
        return self._held.leases

    @property
    def num_rollouts(self) -> int:
        """Leased and unfinished."""
        return self._held.num_rollouts

    @property
    def most_tokens(self) -> int:
        """That the unfinished rollouts may have in the end, all of them together."""
        return self._held.most_tokens

    @property
    def num_held_tokens(self) -> int:
        """That the unfinished rollouts have."""
        return self._drawn.num_held_tokens

    @property
    def num_drawn_tokens(self) -> int:
        """That this node has drawn, of whatever became of them."""
        return self._drawn.num_tokens

    @property
    def num_finished(self) -> int:
        """Rollouts."""
        return self._drawn.num_finished

    @property
    def versions(self) -> frozenset[int]:
        """Policy versions that are needed."""
        return self._held.versions

    @property
    def any_running(self) -> bool:
        """Whether the engine samples for one of them."""
        return self._held.any_running

    @property
    def any_leaving(self) -> bool:
        """Whether one goes back as soon as the engine has told what it drew of it."""
        return bool(self._leaving)

    # --- what the hub says

    def renew(self, lease: Lease, now: float) -> bool:
        """Whether this lease is held already; its deadline then begins anew."""
        return self._held.renew(lease, now)

    def take(self, lease: Lease, pending: Set[int], now: float) -> list[Effect]:
        """Holds a new lease, of which the indices `pending` are to be sampled: one at least."""
        self._held.take(lease, pending, now)
        self._drawn.begin(lease, pending)
        return [SpoolLease(lease_id=lease.lease_id, indices=tuple(sorted(pending)))]

    def revoked(self, lease_id: int) -> list[Effect]:
        """The hub wants no more of it."""
        if self._leaving.pop(lease_id, None) is not None:
            self._held.stopped(lease_id)
        effects: list[Effect] = []
        for unfinished in self._held.let_go(lease_id, "the hub has revoked it"):
            self._drawn.forget(lease_id)
            effects += [*_cancel(unfinished), ForgetLease(lease_id=lease_id)]
        return effects

    def replaced(self, versions: Set[int]) -> list[Effect]:
        """Gives up what was drawn by one of `versions`, whose content is another now."""
        effects: list[Effect] = []
        for lease in self._held.leases if versions else ():
            drawn_by = {self._held.running_by(lease.lease_id)} | self._drawn.versions(lease.lease_id)
            if found := versions & drawn_by:
                self._drawn.forget(lease.lease_id)
                effects += self.give_up(lease.lease_id, f"policy version {max(found)} has been replaced")
        return effects

    def connected(self) -> list[Effect]:
        """The hub, which may have lost what it was sent, is sent all that is drawn."""
        self._drawn.connected()
        return self._send_drawn()

    # --- what the engine tells

    def drawn(self, parts: Iterable[DrawnPart], *, for_hub: bool = True) -> list[Effect]:
        """What it has drawn since it told last. `for_hub`: the hub is sent this, and what was told before."""
        for part in parts:
            self._drawn.add(part)
        return self._send_drawn() if for_hub else []

    def finished(self, finished: FinishedRollout) -> Rollout | None:
        """For the spool; None = it was revoked or returned in the meantime, and the hub has counted it already."""
        if not self._held.finish(finished.lease_id, finished.index):
            return None
        return as_rollout(finished, self._drawn.end(finished))

    def cancelled(self, lease_id: int) -> list[Effect]:
        """It has stopped sampling for this lease, and told all that it drew of it."""
        if self._held.is_moving(lease_id):
            self._held.stopped(lease_id)
        return self._let_leave(lease_id)

    def failed(self, lease_id: int, what: str, *, is_of_version: bool = False) -> list[Effect]:
        """It cannot sample for this lease. `is_of_version`: because of the version by which it runs."""
        unusable = self._held.running_by(lease_id) if is_of_version else None
        self._leaving.pop(lease_id, None)
        self._held.stopped(lease_id)
        return self._return(self._held.let_go(lease_id, what), unusable_version=unusable)

    def engine_lost(self, what: str, blame: Blame) -> list[Effect]:
        """It has ended, or did not start; nothing more comes from it."""
        effects = [effect for lease_id in list(self._leaving) for effect in self._let_leave(lease_id)]
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

    # --- what the node does with them

    def is_held(self, lease_id: int) -> bool:
        return self._held.holds(lease_id)

    def start(self, version_for: Callable[[Lease], int | None]) -> list[Effect]:
        """Has the engine begin what it can by the versions that there are, each rollout behind what is drawn of it."""
        return [
            SubmitGroup(request=replace(request, prefixes=self._drawn.prefixes(request.lease_id, request.indices)))
            for request in self._held.start(version_for)
        ]

    def behind(self, version: int) -> list[tuple[Lease, tuple[int, ...]]]:
        """The leases that run by an older version and may go on by this one, with the tokens that there are of each of
        their unfinished rollouts."""
        return [
            (lease, tuple(self._drawn.num_drawn(lease.lease_id, index) for index in pending))
            for lease, pending in self._held.interruptible(version)
            if lease.lease_id not in self._leaving and len(self._drawn.versions(lease.lease_id)) < MAX_VERSION_SPANS
        ]

    def move(self, leases: Iterable[Lease]) -> list[Effect]:
        """Has the engine stop what it draws of these, which run, to begin it anew behind what is drawn."""
        lease_ids = [lease.lease_id for lease in leases]
        for lease_id in lease_ids:
            self._held.move(lease_id)
        return [CancelLease(lease_id=lease_id) for lease_id in lease_ids]

    def move_all(self) -> list[Effect]:
        """Has the engine stop all that it was not told to stop yet: the next one goes on behind what this one tells."""
        return self.move(
            lease
            for lease in self._held.leases
            if self._held.is_running(lease.lease_id)
            and not (lease.lease_id in self._leaving or self._held.is_moving(lease.lease_id))
        )

    def give_up(self, lease_id: int, reason: str) -> list[Effect]:
        """Returns it as it is, whatever the engine might still tell; nothing, if it is not held."""
        return self._return(self._held.let_go(lease_id, reason))

    def give_back_all(self, reason: str, *, by: float) -> list[Effect]:
        """Returns all: what runs once the engine has told what it drew, or at `by`, if there is a hub to send it to."""
        return self._give_back([lease.lease_id for lease in self._held.leases], reason, by=by)

    def give_back_overdue(self, now: float, *, by: float) -> list[Effect]:
        """As `give_back_all`, what is past its deadline."""
        return self._give_back(self._held.overdue(now), "its deadline has passed", by=by)

    def leave(self, now: float) -> list[Effect]:
        """Returns those for which the engine is not waited any longer."""
        overdue = [lease_id for lease_id, leaving in self._leaving.items() if now >= leaving.by]
        return [effect for lease_id in overdue for effect in self._let_leave(lease_id)]

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

    def _let_leave(self, lease_id: int) -> list[Effect]:
        """The engine has told all, or is not waited for any more."""
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
