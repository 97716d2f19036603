"""A random walk through the states of a work loop, with its invariants checked at every step."""

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
from tests.echo_node.core.loop_parts import WIDTH, Node, continued, drawn, ended, here, interruptible, spans, welcome
from tests.echo_node.core.test_policies import offer as real_offer

STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 3)), max_size=60)


class World:
    """Answers the effects of a work loop at random moments, and accounts for every leased rollout."""

    def __init__(self) -> None:
        self.node = Node()
        self.leased: dict[int, int] = {}
        self.returned: set[str] = set()
        self.revoked: set[int] = set()
        self.spooled: set[str] = set()
        self.sent_before_spooled: set[str] = set()
        self.running: dict[int, set[int]] = {}
        self.versions: dict[int, int] = {}
        """By lease: the version that the engine samples with; before the start, the version that the hub named."""
        self.may_move: set[int] = set()
        self.loaded: set[int] = set()
        self.engine_exists = self.engine_up = self.engine_is_still = self.engine_ends = False
        self.engine_is_outdated = False
        self.holds: tuple[Hold, ...] = ()
        self.unspooled: list[Rollout] = []
        self.fetching: dict[int | None, ArtefactOffer] = {}
        self.on_disk: set[int | None] = {None}
        """Versions on disk; None = the base. A complete version needs only the base, a delta its parent."""
        self.published = 0
        self.drawn: dict[tuple[int, int], list[int]] = {}
        """By rollout: the version of each token that the engine has sampled."""
        self.told: dict[tuple[int, int], int] = {}
        self.known: dict[tuple[int, int], list[int]] = {}
        """By rollout: the versions of the tokens that the node knows, from the lease's prefix or from its engine."""
        self.hub_has: dict[tuple[int, int], int] = {}
        """By rollout: number of tokens that the hub has; cleared when the node connects again."""
        self.cancelling: list[int] = []

    @property
    def engine_works(self) -> bool:
        return self.engine_up and not self.engine_is_still and not self.engine_ends

    def news(self) -> RolloutsDrawn:
        news = [(name, self.told[name], by) for name, by in self.drawn.items() if len(by) > self.told[name]]
        self.told |= {name: len(by) for name, _, by in news}
        self.known |= {name: list(by) for name, _, by in news}
        return RolloutsDrawn(
            parts=tuple(drawn(*name, start, *range(start, len(by)), version=by[-1]) for name, start, by in news)
        )

    def do(self, event: Event) -> None:
        self.node(event, after_s=0.01)
        for effect in self.node.turn:
            self.take(effect)
        for effect in self.node.of(FetchArtefact):
            assert effect.offer.delta_parent in self.on_disk | self.fetching.keys(), "a delta without its parent"

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
            case StartEngine():
                assert not self.engine_exists and not self.holds
                self.engine_exists = True
            case SuspendEngine():
                assert self.engine_up and not self.engine_is_still and not self.engine_ends and self.holds
                self.engine_is_still = True
            case ResumeEngine():
                assert self.engine_is_still and not self.holds
                self.engine_is_still = False
            case EndEngine():
                assert self.engine_exists and not self.engine_ends and (self.holds or self.engine_is_outdated)
                self.engine_ends = True
            case AddPolicy(policy_version=version):
                assert self.engine_works
                self.loaded.add(version)
            case SubmitGroup(request=request):
                assert self.engine_works and request.policy_version in self.loaded
                assert request.lease_id not in self.running, "submitted twice"
                self.running[request.lease_id] = set(request.indices)
                before, self.versions[request.lease_id] = self.versions[request.lease_id], request.policy_version
                assert request.policy_version >= before
                assert request.policy_version == before or request.lease_id in self.may_move
                given = {one.index: len(one.ids) for one in request.prefixes}
                for index in request.indices:
                    name = request.lease_id, index
                    assert given.get(index, 0) == len(self.known[name]), "no reported token is sampled again"
                    self.drawn[name], self.told[name] = list(self.known[name]), len(self.known[name])
            case CancelLease(lease_id=lease_id):
                # It may be gone: an earlier effect cancelled the lease in order to change its version.
                self.running.pop(lease_id, None)
                self.cancelling.append(lease_id)
            case FetchArtefact(policy_version=version, offer=one):
                assert version not in self.fetching, "fetched twice at once"
                self.fetching[version] = one
            case AbandonFetch(policy_version=version):
                del self.fetching[version]
            case RemoveArtefact(policy_version=version):
                self.on_disk.remove(version)
                assert version not in self.loaded
                assert version not in [one.delta_parent for one in self.fetching.values()], "still needed"
            case DropPolicy(policy_version=version):
                self.loaded.remove(version)
            case _:
                pass

    def step(self, kind: int, a: int, b: int) -> None:
        lease_ids = sorted(self.running)
        chosen = lease_ids[a % len(lease_ids)] if lease_ids else None
        if kind == 0:  # The hub's version keeps its content, or has other content after a restore.
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
            index = self.running[chosen].pop()
            by = self.drawn.pop((chosen, index))
            self.known[chosen, index] = [*by, self.versions[chosen]]
            if not self.running[chosen]:
                del self.running[chosen]
            self.do(ended(chosen, index, self.versions[chosen], tokens=len(by) + 1))
        elif kind == 7 and chosen is not None:
            del self.running[chosen]
            self.do(LeaseFailed(lease_id=chosen, what="no"))
        elif kind == 8 and (self.engine_up or self.engine_ends):
            self.engine_up, self.running, self.loaded = False, {}, set()
            self.engine_exists = self.engine_is_still = self.engine_ends = self.engine_is_outdated = False
            self.cancelling, self.drawn = [], {}
            cause: LossCause = ("died", "out_of_memory", "stopped")[a % 3]  # type: ignore[assignment]
            self.do(EngineLost(what="died", cause=cause, width=b))
        elif kind == 9 and self.engine_exists and not self.engine_up:
            self.engine_up = True
            self.do(EngineReady(width=WIDTH))
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
            running = {(lease_id, index) for lease_id, indices in self.running.items() for index in indices}
            for name, by in self.drawn.items():
                by += [self.versions[name[0]]] * a if name in running else []
        elif kind == 15:
            self.do(self.news())
        elif kind == 19:
            held = Hold(HoldReason.PAUSED, "Paused by you."), Hold(HoldReason.FULL_SCREEN, "A game.", frees_memory=True)
            self.holds = ((), held[:1], held[1:])[a % 3]
            self.do(Holding(holds=self.holds, keep_memory_s=0.01 * b))
        elif kind == 20:
            self.engine_is_outdated = self.engine_exists
            self.do(EngineOutdated())
        elif kind == 16 and self.cancelling and not self.engine_is_still:
            lease_id = self.cancelling.pop(0)
            self.do(self.news())
            self.drawn = {name: by for name, by in self.drawn.items() if name[0] != lease_id}
            self.do(LeaseCancelled(lease_id=lease_id))
        elif kind == 18 and self.loaded and self.engine_up:
            self.do(PolicyPrepared(policy_version=sorted(self.loaded)[a % len(self.loaded)]))
        elif kind == 13 and self.published:
            version = max(1, self.published - b)
            self.do(PolicyPublished(policy_version=version, offer=real_offer(version)))
        else:
            self.do(NodeTick(progress=dict.fromkeys(self.fetching, (a, a + b))))


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_leased_index_ends_once(steps: list[tuple[int, int, int]]) -> None:
    world = World()
    world.do(welcome())
    for kind, a, b in steps:
        world.step(kind, a, b)
    world.step(0, 0, 0)  # A new connection makes the node send all that is unsent.
    world.do(DrainRequested(reason="the end"))
    world.node.now += LAST_WORDS_S
    world.do(NodeTick())
    spooled = world.spooled | {rollout.rollout_id for rollout in world.unspooled}
    assert not spooled & world.returned
    for lease_id, count in world.leased.items():
        names = {rollout_id(lease_id, index) for index in range(count)}
        assert lease_id in world.revoked or names <= spooled | world.returned
