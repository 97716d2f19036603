"""A node's work loop: a state machine without I/O that decides what to fetch, sample, store and send.

It joins independent parts: the leases with their tokens (`leases`), the checks of other nodes' completions (`checks`),
the engines (`engines`), each with its life (`engine_life`), its pauses for the owner (`yielding`) and the number of
rollouts that it can finish in time (`pace`), the policy versions (`policies`), and the base model (`base_model`). Only
the loop calls these parts; their return values become effects. The leases and the loop send through one `hub_talk`.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from echo_node.core.base_model import BaseModel
from echo_node.core.checks import Checks
from echo_node.core.effects import (
    AskForReceipts,
    Effect,
    RecordReceipts,
    ResendSpooled,
    SpoolRollout,
    StartEngine,
    Stop,
)
from echo_node.core.engines import DeviceEngine, DeviceWork, Engines, HoldBack
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
from echo_node.core.policies import OnDisk, PolicyVersions
from echo_node.core.progress import WorkProgress
from echo_node.core.standby import sentence
from echo_node.core.tenant_choice import TenantChoice
from echo_node.core.troubles import Trouble
from echo_node.core.yielding import YIELD_S
from echo_shared.errors import POLICY_UNUSABLE
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
"""Seconds for which a lease that goes back to the hub waits for the engine's last tokens."""


class WorkLoop:
    """State machine of the node's work: events in, effects out. Events come one at a time, with a monotonic time."""

    def __init__(
        self,
        *,
        capacity_factor: int,
        unfinished: Mapping[int, tuple[int, ...]],
        unacked: Iterable[str],
        on_disk: Mapping[int, OnDisk],
        devices: Sequence[str] = ("",),
    ) -> None:
        """State from before a restart: `unfinished` (indices by lease id), `unacked` (ids of rollouts without a
        receipt), and the versions `on_disk`. `devices`: those of the engines, one each.
        """
        self._jitter = 0.0
        """Random number in [0, 1) of the current event, see `handle`."""
        self._base = BaseModel()
        self._policies = PolicyVersions(on_disk)
        self._engines = Engines(devices, capacity_factor=capacity_factor)
        self._precision = ""
        """Precision of the engines' weights; empty until an engine has loaded its model."""
        self._checks = Checks()
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
        self.willing = TenantChoice()
        """Tenants of the hub for which the node is willing to work. Set again when the owner's settings change."""
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float, jitter: float) -> tuple[Effect, ...]:
        """Handle an event, and return the effects to carry out. `jitter`, random in [0, 1), spreads waits
        (`backoff_s`).
        """
        self._effects, self._jitter = [], jitter
        HANDLERS[type(event)](self, event, now)
        self._effects += self._leases.leave(now)
        for engine in self._engines:
            if engine.stops_by is not None and now >= engine.stops_by:
                engine.stops_by = None
                self._leases.abandon(engine.device)
            is_told = not self._leases.awaits(engine.device)
            self._effects += engine.yielding.due(now, is_up=engine.life.is_up, is_told=is_told)
        self._reconcile(now)
        self._effects += self._policies.declined()
        self._effects += self._talk.report(self.status(now), now)
        if self._finishing and not self._leases.held:
            self._begin_drain(self._finishing, now)
        self._finish_drain(now)
        return tuple(self._effects)

    def status(self, now: float) -> NodeStatus:
        return NodeStatus(
            activity=self._activity(),
            capacity=0 if self.held_back_by(now) else self._engines.capacity(now),
            policy_version=self._policies.newest_loaded,
            tokens_per_s=self._engines.tokens_per_s,
            precision=self._precision,
            checks=MAX_CHECKS if self._may_check else 0,
        )

    @property
    def rests(self) -> bool:
        """True while the node pauses for its owner and no engine computes any more."""
        is_still = all(engine.yielding.rests and not self._leases.awaits(engine.device) for engine in self._engines)
        return is_still and not self._is_leaving

    @property
    def works(self) -> bool:
        """True while the node samples, or gets ready to sample for a hub that it reaches."""
        activity, is_sound = self._activity(), self._engines.any_is_sound and self._talk.connected
        return activity == "sampling" or (activity in ("preparing", "fetching") and is_sound)

    @property
    def _may_check(self) -> bool:
        return self._engines.can_score and not self._is_leaving

    @property
    def _is_leaving(self) -> bool:
        return bool(self._finishing) or self._drain_by is not None

    def held_back_by(self, now: float) -> tuple[HoldBack, ...]:
        """Return the reasons why the node asks for no work now, in the order of HoldBack; empty = the node asks for
        work.
        """
        reasons: dict[HoldBack, bool] = {
            **self._engines.held_back(now),
            "the spool cannot be written": not self._spool_works,
            "the node is leaving": self._is_leaving,
        }
        return tuple(reason for reason in get_args(HoldBack) if reasons[reason])

    @property
    def held_rollouts(self) -> int:
        return self._leases.num_rollouts

    @property
    def owes_the_hub(self) -> bool:
        """True if the node has leases, or rollouts without a receipt."""
        return bool(self._leases.held or self._spooling or self._unacked)

    @property
    def engine_problems(self) -> dict[str, Trouble | None]:
        """Return the problem of each engine by device; None = the engine has no problem."""
        return {engine.device: engine.problem for engine in self._engines}

    def devices(self, now: float) -> list[DeviceWork]:
        """Return the state of the engine of each device, as the user sees it."""
        return [engine.work(self._leases.num_on(engine.device), now) for engine in self._engines]

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
            tenants=tuple(sorted({lease.tenant for lease in self._leases.held if lease.tenant})),
            is_finishing=bool(self._finishing),
        )

    @property
    def newest_published(self) -> int:
        return self._policies.newest_published

    def _welcome(self, event: Welcome, now: float) -> None:
        self._effects += self._talk.welcomed(event.heartbeat_s)
        self._effects += [ResendSpooled(), AskForReceipts()]
        self._effects += self._base.offered(event.base, event.gguf)
        self._policies.connected()
        self._leases.connected()
        self._offered(self._policies.published(event.policy_version, event.policy))
        if self._base.fetched is not None:
            self._effects += self._talk.send(self._base.fetched)
        for fetched in self._policies.reports:
            self._effects += self._talk.send(fetched)
        self._effects += self._leases.drawn(())

    def _published(self, event: PolicyPublished, now: float) -> None:
        # The offer is older than the newest version: a requested keyframe, which needs no parent.
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
        refusal = self._refusal(event.tenant, len(pending))
        if refusal is not None:
            indices = tuple(sorted(pending))
            self._effects += self._talk.say(LeaseReturned(lease_id=event.lease_id, indices=indices, reason=refusal))
            return
        if event.offer is not None:
            self._offered(self._policies.offered(event.policy_version, event.offer))
        for engine in self._engines:
            engine.pace.leased(event.deadline_s, event.max_tokens)
        self._effects += self._leases.take(event, pending, now)

    def _refusal(self, tenant: str, num_rollouts: int) -> str | None:
        """Return the reason for refusing a lease of `num_rollouts` rollouts for this tenant, or None."""
        if self.willing.refuses_work_of(tenant):
            return "the machine's owner does not work for this tenant"
        if self._is_leaving:
            return "the node is leaving"
        if self._engines.is_held:
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
        self.standby = ""  # Forget the reason: the hub sends it again after a reconnect.

    def _artefact_ready(self, event: ArtefactReady, now: float) -> None:
        if event.policy_version is not None:
            if not self._policies.fetched(event.policy_version, event.fetched):
                return
        elif self._base.arrived(event.fetched):
            for engine in self._engines:
                self._start_engine(engine)
        self._effects += self._talk.send(event.fetched)

    def _fetch_failed(self, event: FetchFailed, now: float) -> None:
        if event.policy_version is not None:
            self._policies.fetch_failed(event.policy_version, now, self._jitter, unreadable=event.unreadable)
        else:
            self._base.fetch_failed(now, self._jitter)

    def _start_engine(self, engine: DeviceEngine) -> None:
        if not engine.yielding.exists:
            self._effects += engine.yielding.start(StartEngine(after_s=0.0, device=engine.device))

    def _engine_ready(self, event: EngineReady, now: float) -> None:
        self._effects += self._engines.ready(event, now)
        if self._engines[event.device].refusal is None:
            self._precision = event.precision

    def _engine_lost(self, event: EngineLost, now: float) -> None:
        engine = self._engines[event.device]
        self._policies.engine_lost(event.device)
        engine.yielding.lost()
        engine.scores = False
        self._effects += self._checks.engine_lost(event.device)
        ending = engine.life.lost(event, now, self._jitter)
        is_only = not self._engines.is_other_up(event.device)
        self._effects += self._leases.engine_lost(event.what, ending.blame, device=event.device, is_only=is_only)
        if self._drain_by is not None or engine.refusal is not None:
            return
        if event.cause != "no_weights":
            self._effects += engine.yielding.start(ending.start)
        elif self._base.fetched is not None:
            self._effects += self._base.lacks_weights()

    def _policy_prepared(self, event: PolicyPrepared, now: float) -> None:
        self._policies.prepared(event.policy_version, event.device)

    def _rollouts_finished(self, event: RolloutsFinished, now: float) -> None:
        engine = self._engines[event.device]
        engine.life.finished_rollout()
        for finished in event.rollouts:
            full = self._leases.num_on(event.device) >= engine.life.width
            engine.pace.finished(len(finished.completion_ids), event.tokens_per_s, full=full)
            rollout = self._leases.finished(finished, device=event.device)
            if rollout is not None:
                self._spooling.add(rollout.rollout_id)
                self._effects.append(SpoolRollout(rollout=rollout))

    def _rollouts_drawn(self, event: RolloutsDrawn, now: float) -> None:
        self._effects += self._leases.drawn(event.parts, device=event.device, for_hub=event.for_hub)

    def _completion_scored(self, event: CompletionScored, now: float) -> None:
        self._effects += self._checks.scored(event.scored)

    def _lease_cancelled(self, event: LeaseCancelled, now: float) -> None:
        self._effects += self._leases.cancelled(event.lease_id, device=event.device)

    def _group_failed(self, event: LeaseFailed, now: float) -> None:
        is_of_version = event.code == POLICY_UNUSABLE
        # A tenant made the adapter, so its faults do not count as the engine's.
        if self._leases.is_held(event.lease_id) and not (is_of_version and self._leases.is_of_tenant(event.lease_id)):
            self._engines[event.device].life.group_failed(now, self._jitter, what=event.what, code=event.code)
        self._effects += self._leases.failed(
            event.lease_id, event.what, device=event.device, is_of_version=is_of_version
        )

    def _spooled(self, event: Spooled, now: float) -> None:
        self._spool_works = True
        for rollout in event.rollouts:
            self._spooling.discard(rollout.rollout_id)
            self._unacked.add(rollout.rollout_id)
            self._effects += self._talk.send(rollout)

    def _spool_failed(self, event: SpoolFailed, now: float) -> None:
        self._spool_works = False

    def _holding(self, event: Holding, now: float) -> None:
        begun = self._engines.hold(event)
        if begun and self._engines.is_held:
            self._stop_work("the machine's owner needs it", now, within_s=YIELD_S)
            return
        for engine in begun:
            self._hand_over(engine, now)

    def _hand_over(self, engine: DeviceEngine, now: float) -> None:
        """Let the other engines continue the leases of an engine that pauses, as far as they can finish them in time.
        The other leases go back to the hub.
        """
        self._effects += self._talk.report(self.status(now), now)
        room = max(0, self.status(now).capacity - self.held_rollouts + self._leases.num_on(engine.device))
        reason = f"the machine's owner needs {engine.device}"
        self._effects += self._leases.hand_over(engine.device, room, reason, by=now + YIELD_S)
        engine.stops_by = now + YIELD_S

    def _engine_outdated(self, event: EngineOutdated, now: float) -> None:
        for engine in self._engines if self._drain_by is None else ():
            if self._engines.outdated(engine) and self._base.fetched is not None:
                self._start_engine(engine)
            elif engine.yielding.renew(now + LAST_WORDS_S):
                self._effects += self._leases.move_all(engine.device)

    def _finish(self, event: FinishRequested, now: float) -> None:
        self._finishing = event.reason

    def _drain(self, event: DrainRequested, now: float) -> None:
        self._begin_drain(event.reason, now)

    def _begin_drain(self, reason: str, now: float) -> None:
        if self._drain_by is None:
            self._drain_by = now + DRAIN_S
            self._stop_work(reason, now, within_s=LAST_WORDS_S)

    def _stop_work(self, reason: str, now: float, *, within_s: float) -> None:
        """Return all leases to the hub. Before the call, the caller must set the state so that `status` reports no
        capacity.
        """
        self._effects += self._checks.give_up()
        # Report the missing capacity first: otherwise the hub would lease the work to this node again.
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
        listening = [engine.device for engine in self._engines.listening]
        self._effects += self._policies.reconcile(leased=leased, engines_up=listening, now=now, jitter=self._jitter)
        for engine in self._engines.listening:
            self._effects += engine.limited()
            self._move_on(engine, now)
        testing = self._engines.testing(self._leases.num_by_device)
        self._effects += self._leases.start(self._policies, self._engines.seats(now), testing=testing)
        scoring = [engine.device for engine in self._engines.listening if engine.scores and not engine.is_held]
        self._effects += self._checks.start({device: self._policies.loaded(device) for device in scoring})

    def _move_on(self, engine: DeviceEngine, now: float) -> None:
        """Stop the leases of this engine that should continue with a newer version, which it has prepared. They start
        again with their tokens as prefix.
        """
        newest = self._policies.newest_prepared(engine.device)
        behind = () if newest is None else self._leases.behind(newest, engine.device)
        if behind and engine.moves_on(behind, self._leases.num_on(engine.device), now):
            self._effects += self._leases.move((lease for lease, _ in behind), engine.device)

    def _activity(self) -> Literal["preparing", "waiting", "fetching", "sampling", "paused", "draining"]:
        if self._drain_by is not None:
            return "draining"
        if self._engines.is_held:
            return "paused"
        if not self._engines.listening:
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
