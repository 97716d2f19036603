"""A random walk through the states of a work loop, with its invariants checked at every step."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.core.effects import (
    AbandonFetch,
    AddPolicy,
    CancelLease,
    DropPolicy,
    Effect,
    EndEngine,
    FetchArtefact,
    RemoveArtefact,
    ResumeEngine,
    SendMessage,
    SpoolRollout,
    StartEngine,
    SubmitGroup,
    SuspendEngine,
)
from echo_node.core.events import (
    Disconnected,
    DrainRequested,
    EngineLost,
    EngineOutdated,
    EngineReady,
    Event,
    FetchFailed,
    Holding,
    LeaseCancelled,
    LeaseFailed,
    LossCause,
    NodeTick,
    PolicyPrepared,
    RolloutsDrawn,
    Spooled,
)
from echo_node.core.manners import Hold, HoldReason
from echo_node.core.work import LAST_WORDS_S
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import (
    ArtefactOffer,
    DropReason,
    LeaseReturned,
    LeaseRevoked,
    PolicyPublished,
    Rollout,
    RolloutParts,
    rollout_id,
)
from tests.echo_node.core.loop_parts import Node, continued, drawn, ended, here, interruptible, spans, welcome
from tests.echo_node.core.test_policies import offer as real_offer

STEPS = st.lists(st.tuples(st.integers(0, 21), st.integers(0, 5), st.integers(0, 3), st.integers(0, 1)), max_size=60)

BOTH_UP = [(11, 0, 1, 0), (9, 2, 1, 0), (9, 2, 1, 1)]
"""Steps after which the engines of two devices sample with the base model."""


class Sampler:
    """An engine's process in the simulated world: its rollouts and versions, and the tokens that it has reported."""

    def __init__(self) -> None:
        self.exists = self.is_up = self.is_still = self.ends = self.is_outdated = False
        self.holds: tuple[Hold, ...] = ()
        self.loaded: set[int] = set()
        self.running: dict[int, set[int]] = {}
        self.versions: dict[tuple[int, int], int] = {}
        """For each rollout, the version with which the engine samples it."""
        self.drawn: dict[tuple[int, int], list[int]] = {}
        """Versions that drew the rollout's tokens in this engine, one per token, by rollout."""
        self.told: dict[tuple[int, int], int] = {}
        self.cancelling: list[int] = []

    @property
    def works(self) -> bool:
        return self.is_up and not self.is_still and not self.ends

    def of_lease(self, lease_id: int) -> list[tuple[int, int]]:
        """Return the lease's cancelled rollouts that the engine still holds."""
        return [name for name in self.drawn if name[0] == lease_id and name[1] not in self.running.get(lease_id, ())]


class World:
    """A simulated hub, disk and engines around a work loop. It answers the loop's effects at random moments, and
    accounts for every leased rollout.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.node = Node(devices=devices)
        self.engines = {device: Sampler() for device in devices}
        self.leased: dict[int, int] = {}
        self.returned: set[str] = set()
        self.revoked: set[int] = set()
        self.spooled: set[str] = set()
        self.versions: dict[int, int] = {}
        """Policy version that the hub named for each lease, by lease."""
        self.may_move: set[int] = set()
        self.unspooled: list[Rollout] = []
        self.fetching: dict[int | None, ArtefactOffer] = {}
        self.on_disk: set[int | None] = {None}
        """Policy versions on the node's disk; None = the base model. A delta needs its parent version, any other
        version only the base model.
        """
        self.published = 0
        self.known: dict[tuple[int, int], list[int]] = {}
        """The node's tokens of each rollout, from the lease's prefix or the engines: policy version of each token, by
        rollout.
        """
        self.hub_has: dict[tuple[int, int], int] = {}
        """Number of tokens that the hub has, by rollout; cleared when the node connects again."""

    def news(self, device: str) -> RolloutsDrawn:
        """Return this engine's report of new tokens. Tokens of a rollout that another engine has taken meanwhile do not
        count as known.
        """
        engine = self.engines[device]
        news = [(name, engine.told[name], by) for name, by in engine.drawn.items() if len(by) > engine.told[name]]
        engine.told |= {name: len(by) for name, _, by in news}
        self.known |= {name: list(by) for name, _, by in news if self.is_on(name, device)}
        return RolloutsDrawn(
            parts=tuple(drawn(*name, start, *range(start, len(by)), version=by[-1]) for name, start, by in news),
            device=device,
        )

    def is_on(self, name: tuple[int, int], device: str) -> bool:
        return self.node.loop._leases._held.runs_on(*name, device)

    def do(self, event: Event) -> None:
        self.node(event, after_s=0.01)
        for effect in self.node.turn:
            self.take(effect)
        for effect in self.node.of(FetchArtefact):
            assert effect.offer.delta_parent in self.on_disk | self.fetching.keys(), "a delta without its parent"
        held = {lease.lease_id for lease in self.node.loop._leases.held}
        assert all(engine.running.keys() <= held for engine in self.engines.values()), "the node has given the lease up"

    def take(self, effect: Effect) -> None:
        match effect:
            case SendMessage(message=LeaseReturned() as returned):
                names = {rollout_id(returned.lease_id, index) for index in returned.indices}
                assert not names & self.returned, "returned twice"
                self.returned |= names
            case SendMessage(message=RolloutParts(parts=parts)):
                for part in parts:
                    name = part.lease_id, part.index
                    assert part.start == self.hub_has.get(name, 0), "sent twice, or not in order"
                    self.hub_has[name] = part.start + len(part.ids)
                    assert part.ids.tolist() == [*range(part.start, self.hub_has[name])]
                    assert {*self.known[name][part.start : self.hub_has[name]]} == {part.policy_version}
            case SendMessage(message=Rollout() as rollout):
                assert rollout.rollout_id in self.spooled, "sent before it was spooled"
            case SpoolRollout(rollout=rollout):
                by = self.known[rollout.lease_id, rollout.index]
                assert (rollout.policy_version_start, rollout.policy_version_end) == (by[0], by[-1])
                expected = [(version, by.count(version)) for version in sorted(set(by))]
                assert spans(rollout) == (expected if len(expected) > 1 else [])
                self.unspooled.append(rollout)
            case FetchArtefact(policy_version=version, offer=one):
                assert version not in self.fetching, "fetched twice at once"
                self.fetching[version] = one
            case AbandonFetch(policy_version=version):
                del self.fetching[version]
            case RemoveArtefact(policy_version=version):
                self.on_disk.remove(version)
                assert all(version not in engine.loaded for engine in self.engines.values())
                assert version not in [one.delta_parent for one in self.fetching.values()], "still needed"
            case (
                StartEngine(device=device)
                | SuspendEngine(device=device)
                | ResumeEngine(device=device)
                | EndEngine(device=device)
                | AddPolicy(device=device)
                | DropPolicy(device=device)
                | SubmitGroup(device=device)
                | CancelLease(device=device)
            ):
                self.tell(self.engines[device], effect)
            case _:
                pass

    def tell(self, engine: Sampler, effect: Effect) -> None:
        match effect:
            case StartEngine():
                assert not engine.exists and not engine.holds
                engine.exists = True
            case SuspendEngine():
                assert engine.works and engine.holds
                engine.is_still = True
            case ResumeEngine():
                assert engine.is_still and not engine.holds
                engine.is_still = False
            case EndEngine():
                assert engine.exists and not engine.ends and (engine.holds or engine.is_outdated)
                engine.ends = True
            case AddPolicy(policy_version=version):
                assert engine.works
                engine.loaded.add(version)
            case DropPolicy(policy_version=version):
                engine.loaded.remove(version)
            case SubmitGroup(request=request):
                self.submit(engine, request)
            case CancelLease(lease_id=lease_id):
                # The lease may be missing: an earlier effect may have cancelled it, in order to change its version.
                engine.running.pop(lease_id, None)
                engine.cancelling.append(lease_id)

    def submit(self, engine: Sampler, request: GroupRequest) -> None:
        assert engine.works and not engine.holds and request.policy_version in engine.loaded
        assert not engine.of_lease(request.lease_id), "the engine has not stopped this lease yet"
        given = {one.index: len(one.ids) for one in request.prefixes}
        for index in request.indices:
            name = request.lease_id, index
            assert all(index not in one.running.get(request.lease_id, ()) for one in self.engines.values()), "twice"
            engine.running.setdefault(request.lease_id, set()).add(index)
            named = self.versions[request.lease_id]
            assert request.policy_version >= max([named, *self.known[name]])
            assert request.policy_version == named or request.lease_id in self.may_move
            assert given.get(index, 0) == len(self.known[name]), "no reported token is sampled again"
            engine.versions[name] = request.policy_version
            engine.drawn[name], engine.told[name] = list(self.known[name]), len(self.known[name])

    def end_rollout(self, device: str, lease_id: int, index: int) -> None:
        engine = self.engines[device]
        by = engine.drawn.pop((lease_id, index))
        version = engine.versions[lease_id, index]
        if self.is_on((lease_id, index), device):
            self.known[lease_id, index] = [*by, version]
        self.do(replace(ended(lease_id, index, version, tokens=len(by) + 1), device=device))

    def lose(self, device: str, cause: LossCause, width: int) -> None:
        before, self.engines[device] = self.engines[device], Sampler()
        self.engines[device].holds = before.holds
        self.do(EngineLost(what="died", cause=cause, width=width, device=device))

    def hold(self, a: int, b: int, device: str) -> None:
        held = Hold(HoldReason.PAUSED, "Paused by you."), Hold(HoldReason.FULL_SCREEN, "A game.", frees_memory=True)
        chosen = ((), held[:1], held[1:])[a % 3]
        is_of_one = a >= 3 and len(self.engines) > 1
        for name, engine in self.engines.items():
            engine.holds = chosen if name == device or not is_of_one else ()
        of_devices = {device: chosen} if is_of_one else {}
        self.do(Holding(holds=() if is_of_one else chosen, keep_memory_s=0.01 * b, of_devices=of_devices))

    def step(self, kind: int, a: int, b: int, device: str) -> None:
        engine = self.engines[device]
        lease_ids = sorted(engine.running)
        chosen = lease_ids[a % len(lease_ids)] if lease_ids else None
        # Reconnect. The hub's newest version keeps its content, or has other content after a restore from a backup.
        if kind == 0:
            news = welcome(self.published)
            self.hub_has = {}
            same = news.model_copy(update={"policy": news.policy and real_offer(self.published)})
            self.do(same if b else news)
        elif kind == 1:
            self.do(Disconnected())
        elif kind == 2 and a not in self.leased:
            version = max(0, self.published - b)
            self.leased[a], self.versions[a] = b + 1, version
            self.hub_has[a, 0] = b
            given = continued(a, 0, *range(b)).prefixes if b else ()
            self.known |= {(a, index): [version] * b if index == 0 else [] for index in range(b + 1)}
            leased = interruptible(a, version=version, count=b + 1)
            if a % 2:
                self.may_move.add(a)
            else:
                leased = leased.model_copy(update={"on_new_version": "finish"})
            self.do(leased.model_copy(update={"prefixes": given}))
        elif kind == 3 and a in self.leased:
            self.revoked.add(a)
            self.do(LeaseRevoked(lease_id=a, reason=DropReason.STALE))
        elif kind in (4, 5, 6) and chosen is not None:
            index = engine.running[chosen].pop()
            if not engine.running[chosen]:
                del engine.running[chosen]
            self.end_rollout(device, chosen, index)
        elif kind == 7 and chosen is not None:
            del engine.running[chosen]
            self.do(LeaseFailed(lease_id=chosen, what="no", device=device))
        elif kind == 8 and (engine.is_up or engine.ends):
            causes: tuple[LossCause, ...] = ("died", "out_of_memory", "stopped")
            self.lose(device, causes[a % 3], b)
        elif kind == 9 and engine.exists and not engine.is_up:
            engine.is_up = True
            self.do(EngineReady(width=max(1, a), tokens_per_s=10.0 * b, device=device))
        elif kind == 10 and self.unspooled:
            batch, self.unspooled = tuple(self.unspooled), []
            self.spooled |= {rollout.rollout_id for rollout in batch}
            self.do(Spooled(rollouts=batch))
        elif kind == 11 and self.fetching:
            version = sorted(self.fetching, key=str)[a % len(self.fetching)]
            del self.fetching[version]
            if b:
                self.on_disk.add(version)
            unreadable = version is not None and a % 2 == 0
            self.do(here(version) if b else FetchFailed(policy_version=version, what="no", unreadable=unreadable))
        elif kind == 12:
            self.published += 1
            parent = self.published - 1 - b if a % 2 and b < self.published - 1 else None
            news = real_offer(self.published, parent=parent)
            self.do(PolicyPublished(policy_version=self.published, offer=news))
        elif kind == 14:
            for lease_id, indices in engine.running.items():
                for index in indices:
                    engine.drawn[lease_id, index] += [engine.versions[lease_id, index]] * a
        elif kind == 15:
            self.do(self.news(device))
        elif kind == 19:
            self.hold(a, b, device)
        elif kind == 20:
            for one in self.engines.values():
                one.is_outdated = one.exists
            self.do(EngineOutdated())
        elif kind == 16 and engine.cancelling and not engine.is_still:
            lease_id = engine.cancelling.pop(0)
            self.do(self.news(device))
            for name in engine.of_lease(lease_id):
                del engine.drawn[name]
            self.do(LeaseCancelled(lease_id=lease_id, device=device))
        elif kind == 17 and engine.cancelling and (late := engine.of_lease(engine.cancelling[0])):
            self.end_rollout(device, *late[0])  # This rollout was finished before the engine read the cancel command.
        elif kind == 18 and engine.loaded and engine.is_up:
            self.do(PolicyPrepared(policy_version=sorted(engine.loaded)[a % len(engine.loaded)], device=device))
        elif kind == 13 and self.published:
            version = max(1, self.published - b)
            self.do(PolicyPublished(policy_version=version, offer=real_offer(version)))
        elif kind == 21:  # The deadline of all leases passes, also of those that run.
            self.node.now += 2.0 * max((lease.deadline_s for lease in self.node.loop._leases.held), default=0.0)
            self.do(NodeTick())
        else:
            self.do(NodeTick(progress=dict.fromkeys(self.fetching, (a, a + b))))


def walk(world: World, steps: list[tuple[int, int, int, int]]) -> None:
    devices = list(world.engines)
    world.do(welcome())
    for kind, a, b, of in steps:
        world.step(kind, a, b, devices[of % len(devices)])
    world.step(0, 0, 0, devices[0])  # Reconnect, so that the node sends everything that is unsent.
    world.do(DrainRequested(reason="the end"))
    world.node.now += LAST_WORDS_S
    world.do(NodeTick())
    spooled = world.spooled | {rollout.rollout_id for rollout in world.unspooled}
    assert not spooled & world.returned
    for lease_id, count in world.leased.items():
        names = {rollout_id(lease_id, index) for index in range(count)}
        assert lease_id in world.revoked or names <= spooled | world.returned


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_leased_index_ends_once(steps: list[tuple[int, int, int, int]]) -> None:
    walk(World(("",)), steps)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_leased_index_ends_once_on_two_devices(steps: list[tuple[int, int, int, int]]) -> None:
    walk(World(("cuda:0", "cuda:1")), [*BOTH_UP, *steps])
