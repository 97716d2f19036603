"""A node's work loop: what to fetch, sample, spool, send and say, as a state machine without I/O.

Invariants:
- a finished rollout is sent only once it is spooled, and is sent again after every reconnect until the hub's receipt;
- after every reconnect the hub is asked for the final receipts that it may have sent meanwhile, and told how all that
  is on disk came here: it may have lost that;
- a lease is sampled with exactly the version that it names, fetched first if need be;
- every leased index ends as one spooled rollout, is returned, or was revoked by the hub;
- a lease on which the engine died `MAX_DEATHS` times is returned, and no other for its sake: from the second death on,
  the leases that were running then are sampled one at a time;
- an engine that runs out of memory starts again with half its width at once, which is no death, until its width is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from echo_node.core.effects import (
    AskForReceipts,
    CancelLease,
    Effect,
    FetchArtefact,
    ForgetLease,
    RecordReceipts,
    ResendSpooled,
    Send,
    SpoolLease,
    SpoolRollout,
    StartBackend,
    Stop,
    SubmitGroup,
)
from echo_node.core.events import (
    ArtefactReady,
    BackendLost,
    BackendReady,
    Disconnected,
    DrainRequested,
    Event,
    FetchFailed,
    GroupFailed,
    RolloutFinished,
    Spooled,
    SpoolFailed,
    Tick,
)
from echo_node.core.pace import Pace
from echo_node.core.policies import OnDisk, Policies
from echo_shared.backoff import backoff_s
from echo_shared.messages import (
    MAX_BATCHED,
    ArtefactOffer,
    Fetched,
    FromNode,
    Goodbye,
    Lease,
    LeaseReturned,
    LeaseRevoked,
    NodeStatus,
    PolicyPublished,
    Receipts,
    Rollout,
    Welcome,
    rollout_id,
)
from echo_shared.sampling import GroupRequest

MAX_DEATHS: Final = 3
SUSPECT_DEATHS: Final = 2
MAX_FAILED_GROUPS: Final = 3
"""So many in a row are not the groups' fault: the node then rests before it asks for more, longer each time."""
USUAL_WIDTH: Final = 32
"""Stands for the width of an engine that ran out of memory before it could tell."""
STEADY_S: Final = 1_800.0
"""An engine that runs out of memory after it worked this long leaks: another of the same width may work as long."""
DRAIN_S: Final = 3.0
"""How long a leaving node waits for the last receipts."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """A lease that this node has not finished."""

    lease: Lease
    pending: set[int]
    due_at: float
    running: bool = False
    deaths: int = 0


class WorkLoop:
    """Events in, effects out; the caller hands events over one at a time, with a clock that never goes back."""

    def __init__(
        self,
        *,
        capacity_factor: int,
        unfinished: Mapping[int, tuple[int, ...]],
        unacked: Iterable[str],
        on_disk: Mapping[int, OnDisk],
        jitter: Callable[[], float],
    ) -> None:
        """From before a restart: `unfinished` (indices by lease) and `unacked` (rollout ids) in the spool; versions."""
        self._capacity_factor = capacity_factor
        self._jitter = jitter
        self._policies = Policies(on_disk=on_disk, jitter=jitter)
        self._pace = Pace()
        self._held: dict[int, _Held] = {}
        self._unacked = set(unacked)
        self._spooling: set[str] = set()
        self._outgoing: list[FromNode] = [
            LeaseReturned(lease_id=lease_id, indices=indices, reason="the node was restarted")
            for lease_id, indices in sorted(unfinished.items())
        ]
        self._connected = False
        self._heartbeat_s = 1.0
        self._base_offer: ArtefactOffer | None = None
        self._base: Fetched | None = None
        self._base_failures = 0
        self._base_retry_at: float | None = None
        self._width = 0
        self._ready_at = 0.0
        self._backend_failures = 0
        self._group_failures = 0
        self._rests_until = 0.0
        self._spool_works = True
        self._drain_by: float | None = None
        self._stopped = False
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """What is to be done after `event`."""
        self._effects = []
        _HANDLERS[type(event)](self, event, now)
        self._reconcile(now)
        self._effects += self._policies.declined()
        self._report(now)
        self._finish_drain(now)
        return tuple(self._effects)

    def status(self, now: float) -> NodeStatus:
        """What the hub is told."""
        most = min(MAX_BATCHED, self._capacity_factor * self._width)
        return NodeStatus(
            activity=self._activity(),
            capacity=self._pace.affordable(most) if self._wants_work(now) else 0,
            policy_version=self._policies.newest_loaded,
            tokens_per_s=self._pace.tokens_per_s,
        )

    @property
    def held_rollouts(self) -> int:
        """Leased and unfinished."""
        return sum(len(held.pending) for held in self._held.values())

    @property
    def newest_published(self) -> int:
        return self._policies.newest_published

    # --- what the hub says

    def _welcome(self, event: Welcome, now: float) -> None:
        self._connected = True
        self._heartbeat_s = event.heartbeat_s
        self._reported = ()
        for message in self._outgoing:
            self._send(message)
        self._outgoing.clear()
        self._effects += [ResendSpooled(), AskForReceipts()]
        if self._base_offer is None:
            self._effects.append(FetchArtefact(policy_version=None, offer=event.base))
        self._base_offer = event.base
        self._policies.connected()
        self._effects += self._policies.published(event.policy_version, event.policy)
        if self._base is not None:
            self._send(self._base)
        for fetched in self._policies.reports:
            self._send(fetched)

    def _published(self, event: PolicyPublished, now: float) -> None:
        if event.policy_version < self._policies.newest_published:  # A keyframe that this node has asked for.
            self._effects += self._policies.offered(event.policy_version, event.offer)
        else:
            self._effects += self._policies.published(event.policy_version, event.offer)

    def _leased(self, event: Lease, now: float) -> None:
        known = self._held.get(event.lease_id)
        if known is not None:
            known.due_at = now + event.deadline_s
            return
        on_their_way = self._unacked | self._spooling
        pending = {index for index in event.indices if rollout_id(event.lease_id, index) not in on_their_way}
        if not pending:
            return
        indices = tuple(sorted(pending))
        if self._drain_by is not None:
            self._send(LeaseReturned(lease_id=event.lease_id, indices=indices, reason="the node is leaving"))
            return
        if self.held_rollouts + len(pending) > MAX_BATCHED:
            self._send(LeaseReturned(lease_id=event.lease_id, indices=indices, reason="the node holds enough work"))
            return
        if event.offer is not None:
            self._effects += self._policies.offered(event.policy_version, event.offer)
        self._pace.leased(event.deadline_s, event.max_tokens)
        self._held[event.lease_id] = _Held(lease=event, pending=pending, due_at=now + event.deadline_s)
        self._effects.append(SpoolLease(lease_id=event.lease_id, indices=indices))

    def _revoked(self, event: LeaseRevoked, now: float) -> None:
        held = self._held.get(event.lease_id)
        if held is not None:
            self._let_go(held)
            self._effects.append(ForgetLease(lease_id=event.lease_id))

    def _acknowledged(self, event: Receipts, now: float) -> None:
        self._unacked -= {receipt.rollout_id for receipt in event.receipts}
        self._effects.append(RecordReceipts(receipts=event.receipts))

    def _disconnected(self, event: Disconnected, now: float) -> None:
        self._connected = False

    # --- what the shells report

    def _artefact_ready(self, event: ArtefactReady, now: float) -> None:
        if event.policy_version is not None:
            if not self._policies.fetched(event.policy_version, event.fetched):
                return
        elif self._base is None:
            self._base = event.fetched
            self._effects.append(StartBackend(after_s=0.0))
        self._send(event.fetched)

    def _fetch_failed(self, event: FetchFailed, now: float) -> None:
        if event.policy_version is not None:
            self._policies.fetch_failed(event.policy_version, now, unreadable=event.unreadable)
        else:
            self._base_retry_at = now + backoff_s(self._base_failures, self._jitter())
            self._base_failures += 1

    def _backend_ready(self, event: BackendReady, now: float) -> None:
        self._width = event.width
        self._ready_at = now
        self._pace.tokens_per_s = event.tokens_per_s

    def _backend_lost(self, event: BackendLost, now: float) -> None:
        self._policies.engine_lost()
        was_steady = self._width > 0 and now - self._ready_at >= STEADY_S
        if event.cause == "replaced":
            self._restart(StartBackend(after_s=0.0))
        elif event.cause == "out_of_memory" and (was_steady or event.width != 1):
            half = max(1, (event.width or USUAL_WIDTH) // 2)
            self._restart(StartBackend(after_s=0.0, max_width=0 if was_steady else half))
        else:
            self._count_death(event.what)
            failures = self._backend_failures
            after_s = 0.0 if failures == 0 else backoff_s(failures - 1, self._jitter())
            self._restart(StartBackend(after_s=after_s))
            self._backend_failures += 1

    def _count_death(self, what: str) -> None:
        if self._width == 0:
            for held in list(self._held.values()):
                self._return(held, f"the sampling engine does not start: {what}")
        for held in [held for held in self._held.values() if held.running]:
            held.deaths += 1
            if held.deaths >= MAX_DEATHS:
                held.running = False  # There is nothing left to cancel.
                self._return(held, f"the sampling engine died {held.deaths} times on it: {what}")

    def _restart(self, start: StartBackend) -> None:
        self._width = 0
        for held in self._held.values():
            held.running = False
        if self._drain_by is None:
            self._effects.append(start)

    def _rollout_finished(self, event: RolloutFinished, now: float) -> None:
        finished = event.rollout
        self._backend_failures = 0
        self._group_failures = 0
        full = self.held_rollouts >= self._width
        self._pace.finished(len(finished.completion_ids), event.tokens_per_s, full=full)
        held = self._held.get(finished.lease_id)
        if held is None or finished.index not in held.pending:
            return  # Revoked or returned in the meantime: the hub has counted it already.
        rollout = Rollout(
            rollout_id=rollout_id(finished.lease_id, finished.index),
            lease_id=finished.lease_id,
            group_id=finished.group_id,
            index=finished.index,
            policy_version_start=finished.policy_version,
            policy_version_end=finished.policy_version,
            completion_ids=finished.completion_ids,
            behavior_logprobs=finished.behavior_logprobs,
            finish_reason=finished.finish_reason,
            sampling_s=finished.sampling_s,
        )
        self._spooling.add(rollout.rollout_id)
        self._effects.append(SpoolRollout(rollout=rollout))
        held.pending.discard(finished.index)
        if not held.pending:
            del self._held[finished.lease_id]

    def _group_failed(self, event: GroupFailed, now: float) -> None:
        held = self._held.get(event.lease_id)
        if held is not None:
            held.running = False
            self._return(held, event.what)
            self._group_failures += 1
            if self._group_failures >= MAX_FAILED_GROUPS:
                wait_s = backoff_s(self._group_failures - MAX_FAILED_GROUPS, self._jitter())
                self._rests_until = max(self._rests_until, now + wait_s)

    def _spooled(self, event: Spooled, now: float) -> None:
        self._spool_works = True
        for rollout in event.rollouts:
            self._spooling.discard(rollout.rollout_id)
            self._unacked.add(rollout.rollout_id)
            self._send(rollout)

    def _spool_failed(self, event: SpoolFailed, now: float) -> None:
        self._spool_works = False

    def _drain(self, event: DrainRequested, now: float) -> None:
        if self._drain_by is None:
            self._drain_by = now + DRAIN_S
            self._report(now)  # Before the leases go back, or the hub would lease them to this node again.
            for held in list(self._held.values()):
                self._return(held, event.reason)

    def _tick(self, event: Tick, now: float) -> None:
        self._policies.progressed(event.progress)
        if self._base_retry_at is not None and self._base_retry_at <= now and self._base_offer is not None:
            self._base_retry_at = None
            self._effects.append(FetchArtefact(policy_version=None, offer=self._base_offer))
        for held in list(self._held.values()):
            grace_s = held.lease.deadline_s if held.running else 0.0
            if now > held.due_at + grace_s:
                self._return(held, "its deadline has passed")

    # --- what follows from the state

    def _reconcile(self, now: float) -> None:
        if self._base is None or self._drain_by is not None:
            return
        for held in list(self._held.values()):
            if self._policies.is_hopeless(held.lease.policy_version):
                self._return(held, f"the node cannot get policy version {held.lease.policy_version}")
        leased = {held.lease.policy_version for held in self._held.values()}
        self._effects += self._policies.reconcile(leased=leased, engine_up=self._width > 0, now=now)
        self._submit()

    def _submit(self) -> None:
        suspects = [held for held in self._held.values() if held.deaths >= SUSPECT_DEATHS]
        running = any(held.running for held in self._held.values())
        ready = [h for h in suspects or self._held.values() if self._policies.is_loaded(h.lease.policy_version)]
        if suspects:
            ready = [] if running else ready[:1]
        for held in ready:
            if not held.running:
                held.running = True
                self._effects.append(SubmitGroup(request=_request(held)))

    def _report(self, now: float) -> None:
        status = self.status(now)
        news = (status.activity, status.capacity, status.policy_version)
        if self._connected and (news != self._reported or now - self._reported_at >= self._heartbeat_s):
            self._reported = news
            self._reported_at = now
            self._send(status)

    def _wants_work(self, now: float) -> bool:
        return self._width > 0 and self._spool_works and self._drain_by is None and now >= self._rests_until

    def _activity(self) -> Literal["preparing", "waiting", "fetching", "sampling", "draining"]:
        if self._drain_by is not None:
            return "draining"
        if self._width == 0:
            return "preparing"
        if any(held.running for held in self._held.values()):
            return "sampling"
        return "fetching" if self._policies.fetching_newest else "waiting"

    def _finish_drain(self, now: float) -> None:
        if self._drain_by is None or self._stopped:
            return
        waiting = self._spooling or (self._connected and self._unacked)
        if not waiting or now >= self._drain_by:
            self._stopped = True
            self._send(Goodbye(reason="the node is leaving"))
            self._connected = False
            self._effects.append(Stop())

    def _return(self, held: _Held, reason: str) -> None:
        self._let_go(held)
        self._say(LeaseReturned(lease_id=held.lease.lease_id, indices=tuple(sorted(held.pending)), reason=reason))

    def _let_go(self, held: _Held) -> None:
        if held.running:
            self._effects.append(CancelLease(lease_id=held.lease.lease_id))
        del self._held[held.lease.lease_id]

    def _say(self, message: FromNode) -> None:
        """Send now, or after the next Welcome."""
        if self._connected:
            self._send(message)
        else:
            self._outgoing.append(message)

    def _send(self, message: FromNode) -> None:
        if self._connected:
            self._effects.append(Send(message=message))
            if isinstance(message, LeaseReturned):
                self._effects.append(ForgetLease(lease_id=message.lease_id))


def _request(held: _Held) -> GroupRequest:
    lease = held.lease
    return GroupRequest(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        indices=tuple(sorted(held.pending)),
        prompt_ids=lease.prompt_ids,
        seed=lease.seed,
        policy_version=lease.policy_version,
        temperature=lease.temperature,
        max_tokens=lease.max_tokens,
        stop_ids=lease.stop_ids,
    )


_HANDLERS: Final[dict[type, Callable[[WorkLoop, Any, float], None]]] = {
    Welcome: WorkLoop._welcome,
    PolicyPublished: WorkLoop._published,
    Lease: WorkLoop._leased,
    LeaseRevoked: WorkLoop._revoked,
    Receipts: WorkLoop._acknowledged,
    Disconnected: WorkLoop._disconnected,
    ArtefactReady: WorkLoop._artefact_ready,
    FetchFailed: WorkLoop._fetch_failed,
    BackendReady: WorkLoop._backend_ready,
    BackendLost: WorkLoop._backend_lost,
    RolloutFinished: WorkLoop._rollout_finished,
    GroupFailed: WorkLoop._group_failed,
    Spooled: WorkLoop._spooled,
    SpoolFailed: WorkLoop._spool_failed,
    DrainRequested: WorkLoop._drain,
    Tick: WorkLoop._tick,
}
