"""A node's work loop: a state machine without I/O that decides what to fetch, sample, store and send.

It joins independent parts: the leases with their tokens (`leases`), the checks of other nodes' completions (`checks`),
the engine's life (`engine_life`) and its pauses for the owner (`yielding`), the policy versions (`policies`), the base
model (`base_model`), and the number of rollouts that the node can finish in time (`pace`). Only the loop calls these
parts; their return values become effects. The leases and the loop send through one `hub_talk`.

Invariants:
- A finished rollout is stored on disk (spooled) before it is sent, and sent again after every reconnect until the hub's
  receipt arrives.
- After every reconnect the node asks for the receipts that it missed, and reports the fetches of everything on disk,
  because the hub may have lost both.
- A lease is sampled with exactly its version, which is fetched first if needed. An interruptible lease uses the newest
  version here, and switches in mid-completion to each newer one, if `echo_shared.sampling.moving_on` finds that
  worthwhile.
- Every leased index ends as one stored rollout, is returned, or was revoked by the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

from echo_node.core.base_model import BaseModel
from echo_node.core.checks import Checks
from echo_node.core.effects import (
    AskForReceipts,
    Effect,
    LimitDuty,
    RecordReceipts,
    ResendSpooled,
    SpoolRollout,
    StartEngine,
    Stop,
)
from echo_node.core.engine_life import EngineLife
from echo_node.core.events import (
    ArtefactReady,
    CompletionScored,
    Disconnected,
    DrainRequested,
    EngineLost,
    EngineOutdated,
    EngineReady,
    Event,
    FetchFailed,
    FinishRequested,
    Holding,
    LeaseCancelled,
    LeaseFailed,
    NodeTick,
    PolicyPrepared,
    RolloutsDrawn,
    RolloutsFinished,
    Spooled,
    SpoolFailed,
)
from echo_node.core.hub_talk import HubTalk
from echo_node.core.leases import Leases
from echo_node.core.pace import OwnPace
from echo_node.core.policies import OnDisk, PolicyVersions
from echo_node.core.progress import WorkProgress
from echo_node.core.standby import sentence
from echo_node.core.troubles import Trouble
from echo_node.core.yielding import YIELD_S, Yielding
from echo_shared.errors import POLICY_UNUSABLE
from echo_shared.sampling.moving_on import MovingOn
from echo_shared.wire.messages import (
    MAX_BATCHED,
    MAX_CHECKS,
    CheckLease,
    Goodbye,
    Lease,
    LeaseReturned,
    LeaseRevoked,
    NodeStatus,
    PolicyPublished,
    Receipts,
    Standby,
    Welcome,
    rollout_id,
)

DRAIN_S: Final = 3.0
"""Seconds for which a node that stops waits for the hub's last receipts."""

LAST_WORDS_S: Final = 2.0
"""Seconds for which the return of a lease waits for the engine's last tokens."""

HoldBack = Literal[
    "the engine is not up",
    "the spool cannot be written",
    "the node is leaving",
    "groups keep failing",
    "the machine is its owner's",
]


class WorkLoop:
    """State machine of the node's work: events in, effects out. Events come one at a time, with a monotonic time."""

    def __init__(
        self,
        *,
        capacity_factor: int,
        unfinished: Mapping[int, tuple[int, ...]],
        unacked: Iterable[str],
        on_disk: Mapping[int, OnDisk],
    ) -> None:
        """State from before a restart: `unfinished` (indices by lease id), `unacked` (ids of rollouts without a
        receipt), and the versions `on_disk`.
        """
        self._capacity_factor = capacity_factor
        self._jitter = 0.0
        """The `jitter` of the current event, see `handle`."""
        self._base = BaseModel()
        self._policies = PolicyVersions(on_disk)
        self._engine = EngineLife()
        self._yielding = Yielding()
        self._share = self._engines_share = 1.0
        """Share of its device's time that the engine may use, and the share that it was told."""
        self._pace = OwnPace()
        self._precision = ""
        """Precision of the engine's weights; empty until an engine has loaded its model."""
        self._checks = Checks()
        self._moving_on = MovingOn()
        self._talk = HubTalk(
            LeaseReturned(lease_id=lease_id, indices=indices, reason="the node was restarted")
            for lease_id, indices in sorted(unfinished.items())
        )
        self._leases = Leases(self._talk)
        self._unacked = set(unacked)
        self._spooling: set[str] = set()
        self._spool_works = True
        self._finishing = ""
        """Reason for stopping after the current leases; empty = the node goes on."""
        self._drain_by: float | None = None
        self._stopped = False
        self.standby = ""
        """Sentence with the reason why the hub gives no work; empty = no known reason."""
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float, jitter: float) -> tuple[Effect, ...]:
        """Handle an event, and return the effects to carry out. `jitter`, random in [0, 1), spreads waits
        (`backoff_s`).
        """
        self._effects, self._jitter = [], jitter
        HANDLERS[type(event)](self, event, now)
        self._effects += self._leases.leave(now)
        self._effects += self._yielding.due(now, is_up=self._engine.is_up, is_told=self._has_told)
        self._reconcile(now)
        self._effects += self._policies.declined()
        self._effects += self._talk.report(self.status(now), now)
        if self._finishing and not self._leases.held:
            self._begin_drain(self._finishing, now)
        self._finish_drain(now)
        return tuple(self._effects)

    def status(self, now: float) -> NodeStatus:
        most = min(MAX_BATCHED, self._capacity_factor * self._engine.width)
        return NodeStatus(
            activity=self._activity(),
            capacity=0 if self.held_back_by(now) else self._pace.affordable(most),
            policy_version=self._policies.newest_loaded,
            tokens_per_s=self._pace.tokens_per_s,
            precision=self._precision,
            checks=MAX_CHECKS if self._may_check else 0,
        )

    @property
    def _has_told(self) -> bool:
        """True if the engine has reported all tokens of the leases that it was told to stop."""
        return not (self._leases.any_leaving or (self._yielding.is_renewing and self._leases.any_running))

    @property
    def rests(self) -> bool:
        """True while the node pauses for its owner and no work runs any more."""
        return self._yielding.rests and self._has_told and not self._is_leaving

    @property
    def works(self) -> bool:
        """True while the node samples, or gets ready to sample for a hub that it reaches."""
        activity = self._activity()
        is_getting_ready = activity in ("preparing", "fetching") and self._engine.problem is None
        return activity == "sampling" or (is_getting_ready and self._talk.connected)

    @property
    def _may_check(self) -> bool:
        return self._checks.can_score and not (self._is_leaving or self._yielding.holds)

    @property
    def _is_leaving(self) -> bool:
        return bool(self._finishing) or self._drain_by is not None

    def held_back_by(self, now: float) -> tuple[HoldBack, ...]:
        """Return the reasons for asking for no work now; empty = the node asks for work."""
        reasons: dict[HoldBack, bool] = {
            "the engine is not up": not self._engine.is_up or self._yielding.is_renewing,
            "the spool cannot be written": not self._spool_works,
            "the node is leaving": self._is_leaving,
            "groups keep failing": self._engine.is_resting(now),
            "the machine is its owner's": bool(self._yielding.holds) or self._yielding.is_still,
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    @property
    def held_rollouts(self) -> int:
        return self._leases.num_rollouts

    @property
    def owes_the_hub(self) -> bool:
        """True if the node has leases, or rollouts without a receipt."""
        return bool(self._leases.held or self._spooling or self._unacked)

    @property
    def engine_problem(self) -> Trouble | None:
        return self._engine.problem

    @property
    def progress(self) -> WorkProgress:
        newest = self._policies.newest_loaded
        return WorkProgress(
            rollouts=self.held_rollouts,
            tokens=self._leases.num_held_tokens,
            most_tokens=self._leases.most_tokens,
            drawn_tokens=self._leases.num_drawn_tokens,
            finished_rollouts=self._leases.num_finished,
            newest_by=self._base.fetched if newest == 0 else None if newest is None else self._policies.arrived(newest),
            is_finishing=bool(self._finishing),
        )

    @property
    def newest_published(self) -> int:
        return self._policies.newest_published

    def _welcome(self, event: Welcome, now: float) -> None:
        self._effects += self._talk.welcomed(event.heartbeat_s)
        self._effects += [ResendSpooled(), AskForReceipts()]
        self._effects += self._base.offered(event.base)
        self._policies.connected()
        self._offered(self._policies.published(event.policy_version, event.policy))
        if self._base.fetched is not None:
            self._effects += self._talk.send(self._base.fetched)
        for fetched in self._policies.reports:
            self._effects += self._talk.send(fetched)
        self._effects += self._leases.connected()

    def _published(self, event: PolicyPublished, now: float) -> None:
        # An older version is a keyframe (it needs no parent) that this node has requested.
        if event.policy_version < self._policies.newest_published:
            self._offered(self._policies.offered(event.policy_version, event.offer))
        else:
            self._offered(self._policies.published(event.policy_version, event.offer))

    def _offered(self, effects: Iterable[Effect]) -> None:
        """Add the effects of an offer. If it replaces the content of a version, leases with tokens of that version
        first go back to the hub.
        """
        self._effects += self._leases.replaced(self._policies.take_replaced())
        self._effects += effects

    def _leased(self, event: Lease, now: float) -> None:
        self.standby = ""
        if self._leases.renew(event, now):
            return
        on_their_way = self._unacked | self._spooling
        pending = {index for index in event.indices if rollout_id(event.lease_id, index) not in on_their_way}
        if not pending:
            return
        refusal = self._refusal(len(pending))
        if refusal is not None:
            indices = tuple(sorted(pending))
            self._effects += self._talk.say(LeaseReturned(lease_id=event.lease_id, indices=indices, reason=refusal))
            return
        if event.offer is not None:
            self._offered(self._policies.offered(event.policy_version, event.offer))
        self._pace.leased(event.deadline_s, event.max_tokens)
        self._effects += self._leases.take(event, pending, now)

    def _refusal(self, num_rollouts: int) -> str | None:
        """Return the reason for refusing a lease of `num_rollouts` rollouts, or None."""
        if self._is_leaving:
            return "the node is leaving"
        if self._yielding.holds:
            return "the machine is its owner's"
        if self.held_rollouts + num_rollouts > MAX_BATCHED:
            return "the node holds enough work"
        return None

    def _revoked(self, event: LeaseRevoked, now: float) -> None:
        self._effects += self._leases.revoked(event.lease_id)

    def _check_leased(self, event: CheckLease, now: float) -> None:
        self._effects += self._checks.take(event, now, can=self._may_check, on_disk=self._policies.on_disk)

    def _stands_by(self, event: Standby, now: float) -> None:
        self.standby = "" if event.reason is None else sentence(event)

    def _acknowledged(self, event: Receipts, now: float) -> None:
        self._unacked -= {receipt.rollout_id for receipt in event.receipts}
        self._effects.append(RecordReceipts(receipts=event.receipts))

    def _disconnected(self, event: Disconnected, now: float) -> None:
        self._talk.disconnected()
        self._checks.give_up()
        self.standby = ""  # The hub sends the reason again after a reconnect.

    def _artefact_ready(self, event: ArtefactReady, now: float) -> None:
        if event.policy_version is not None:
            if not self._policies.fetched(event.policy_version, event.fetched):
                return
        elif self._base.arrived(event.fetched):
            self._effects += self._yielding.start(StartEngine(after_s=0.0))
        self._effects += self._talk.send(event.fetched)

    def _fetch_failed(self, event: FetchFailed, now: float) -> None:
        if event.policy_version is not None:
            self._policies.fetch_failed(event.policy_version, now, self._jitter, unreadable=event.unreadable)
        else:
            self._base.fetch_failed(now, self._jitter)

    def _engine_ready(self, event: EngineReady, now: float) -> None:
        self._engine.ready(event, now)
        self._engines_share = 1.0
        self._pace.tokens_per_s, self._precision = event.tokens_per_s, event.precision
        self._checks.can_score = event.scores

    def _engine_lost(self, event: EngineLost, now: float) -> None:
        self._policies.engine_lost()
        self._yielding.lost()
        self._effects += self._checks.engine_lost()
        ending = self._engine.lost(event, now, self._jitter)
        self._effects += self._leases.engine_lost(event.what, ending.blame)
        if self._drain_by is None:
            lacks_weights = event.cause == "no_weights"
            self._effects += self._base.lacks_weights() if lacks_weights else self._yielding.start(ending.start)

    def _policy_prepared(self, event: PolicyPrepared, now: float) -> None:
        self._policies.prepared(event.policy_version)

    def _rollouts_finished(self, event: RolloutsFinished, now: float) -> None:
        self._engine.finished_rollout()
        for finished in event.rollouts:
            full = self.held_rollouts >= self._engine.width
            self._pace.finished(len(finished.completion_ids), event.tokens_per_s, full=full)
            rollout = self._leases.finished(finished)
            if rollout is not None:
                self._spooling.add(rollout.rollout_id)
                self._effects.append(SpoolRollout(rollout=rollout))

    def _rollouts_drawn(self, event: RolloutsDrawn, now: float) -> None:
        self._effects += self._leases.drawn(event.parts, for_hub=event.for_hub)

    def _completion_scored(self, event: CompletionScored, now: float) -> None:
        self._effects += self._checks.scored(event.scored)

    def _lease_cancelled(self, event: LeaseCancelled, now: float) -> None:
        self._effects += self._leases.cancelled(event.lease_id)

    def _group_failed(self, event: LeaseFailed, now: float) -> None:
        if self._leases.is_held(event.lease_id):
            self._engine.group_failed(now, self._jitter, what=event.what, code=event.code)
        self._effects += self._leases.failed(event.lease_id, event.what, is_of_version=event.code == POLICY_UNUSABLE)

    def _spooled(self, event: Spooled, now: float) -> None:
        self._spool_works = True
        for rollout in event.rollouts:
            self._spooling.discard(rollout.rollout_id)
            self._unacked.add(rollout.rollout_id)
            self._effects += self._talk.send(rollout)

    def _spool_failed(self, event: SpoolFailed, now: float) -> None:
        self._spool_works = False

    def _holding(self, event: Holding, now: float) -> None:
        self._share = event.share
        if self._yielding.hold(event.holds, keep_memory_s=event.keep_memory_s):
            self._stop_work("the machine's owner needs it", now, within_s=YIELD_S)

    def _engine_outdated(self, event: EngineOutdated, now: float) -> None:
        if self._drain_by is None and self._yielding.renew(now + LAST_WORDS_S):
            self._effects += self._leases.move_all()

    def _finish(self, event: FinishRequested, now: float) -> None:
        self._finishing = event.reason

    def _drain(self, event: DrainRequested, now: float) -> None:
        self._begin_drain(event.reason, now)

    def _begin_drain(self, reason: str, now: float) -> None:
        if self._drain_by is None:
            self._drain_by = now + DRAIN_S
            self._stop_work(reason, now, within_s=LAST_WORDS_S)

    def _stop_work(self, reason: str, now: float, *, within_s: float) -> None:
        """Return all leases to the hub. The caller must have set the state in which `status` reports no capacity."""
        self._effects += self._checks.give_up()
        # Report first: otherwise the hub would lease the work to this node again.
        self._effects += self._talk.report(self.status(now), now)
        self._effects += self._leases.give_back_all(reason, by=now + within_s)

    def _tick(self, event: NodeTick, now: float) -> None:
        self._policies.progressed(event.progress)
        self._checks.overdue(now)
        self._effects += self._base.due(now)
        self._effects += self._leases.give_back_overdue(now, by=now + LAST_WORDS_S)

    def _reconcile(self, now: float) -> None:
        if self._base.fetched is None or self._drain_by is not None:
            return
        for lease in self._leases.held:
            if self._policies.is_hopeless(lease):
                reason = f"the node cannot get policy version {lease.policy_version}"
                self._effects += self._leases.give_up(lease.lease_id, reason)
        leased = self._leases.versions | self._checks.versions
        engine_up = self._engine.is_up and not self._yielding.is_still
        self._effects += self._policies.reconcile(leased=leased, engine_up=engine_up, now=now, jitter=self._jitter)
        if not engine_up:
            return
        if self._share != self._engines_share:
            # Until the engine is measured at the smaller share, assume that its speed falls in proportion.
            self._pace.tokens_per_s *= min(1.0, self._share / self._engines_share)
            self._engines_share = self._share
            self._effects.append(LimitDuty(share=self._share))
        self._move_on(now)
        self._effects += self._leases.start(self._policies)
        self._effects += self._checks.start(self._policies.loaded)

    def _move_on(self, now: float) -> None:
        """Stop the leases that a newer prepared version should continue. They start again with their tokens
        as prefix.
        """
        newest = self._policies.newest_prepared
        behind = () if newest is None else self._leases.behind(newest)
        if not behind:
            return
        rate = self._pace.tokens_per_s
        token_s = min(self._engine.width, self.held_rollouts) / rate if rate else 0.0
        longest = max(lease.max_tokens - count for lease, counts in behind for count in counts)
        if self._moving_on.is_due(longest, token_s=token_s, now=now):
            read = sum(len(lease.prompt_ids) + count for lease, counts in behind for count in counts)
            self._moving_on.moved(read, tokens_per_s=rate, now=now)
            self._effects += self._leases.move(lease for lease, _ in behind)

    def _activity(self) -> Literal["preparing", "waiting", "fetching", "sampling", "paused", "draining"]:
        if self._drain_by is not None:
            return "draining"
        if self._yielding.holds:
            return "paused"
        if not self._engine.is_up or self._yielding.is_still:
            return "preparing"
        if self._leases.any_running:
            return "sampling"
        return "fetching" if self._policies.fetching_newest else "waiting"

    def _finish_drain(self, now: float) -> None:
        if self._drain_by is None or self._stopped:
            return
        waiting = self._leases.any_leaving or self._spooling or (self._talk.connected and self._unacked)
        if not waiting or now >= self._drain_by:
            self._stopped = True
            self._effects += self._talk.send(Goodbye(reason="the node is leaving"))
            self._talk.disconnected()
            self._effects.append(Stop())


HANDLERS: Final[dict[type, Callable[[WorkLoop, Any, float], None]]] = {
    Welcome: WorkLoop._welcome,
    PolicyPublished: WorkLoop._published,
    Lease: WorkLoop._leased,
    LeaseRevoked: WorkLoop._revoked,
    CheckLease: WorkLoop._check_leased,
    Standby: WorkLoop._stands_by,
    Receipts: WorkLoop._acknowledged,
    Disconnected: WorkLoop._disconnected,
    ArtefactReady: WorkLoop._artefact_ready,
    FetchFailed: WorkLoop._fetch_failed,
    EngineReady: WorkLoop._engine_ready,
    EngineLost: WorkLoop._engine_lost,
    PolicyPrepared: WorkLoop._policy_prepared,
    RolloutsFinished: WorkLoop._rollouts_finished,
    RolloutsDrawn: WorkLoop._rollouts_drawn,
    CompletionScored: WorkLoop._completion_scored,
    LeaseCancelled: WorkLoop._lease_cancelled,
    LeaseFailed: WorkLoop._group_failed,
    Spooled: WorkLoop._spooled,
    SpoolFailed: WorkLoop._spool_failed,
    Holding: WorkLoop._holding,
    EngineOutdated: WorkLoop._engine_outdated,
    FinishRequested: WorkLoop._finish,
    DrainRequested: WorkLoop._drain,
    NodeTick: WorkLoop._tick,
}
