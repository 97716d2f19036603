"""The nodes and how much work each still takes: which node is next.

A node's *window*, how many rollouts it may hold, is earned: it starts small, grows by one with each rollout that comes
back in time and is scored, and shrinks with each that does not. What a node claims is only a ceiling. As long as any
other node is there, one that has returned nothing yet is given one rollout, and all such nodes together hold no more
than `strangers` says.

A node is *ready* when a quarter of what it may hold is free, or room for a whole lease: a place that is filled the
moment it is free would make every lease one rollout long. In a multi-turn run most leases are that long anyway, and a
node is ready as soon as it has room for one. Rollouts past their deadline take up no room, for the node may have lost
them.

Nodes wait by version and by the class of their pace (see `queues`): a caller that must have something back soon asks
for fast ones. A resting node is no candidate, whatever it reports: see `conduct`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from math import exp, floor, log
from types import MappingProxyType
from typing import Final, assert_never

from echo_hub.core.nodes.conduct import Conduct
from echo_hub.core.nodes.node import UNPROVEN, Node, NodeSettings, Place
from echo_hub.core.nodes.origins import Origins
from echo_hub.core.nodes.queues import ReadyQueues
from echo_hub.core.nodes.strangers import Strangers
from echo_shared.messages import MAX_BATCHED

REMEMBERED: Final = 65_536
"""Proven nodes that have left and whose window and pace are kept: those that left longest ago are forgotten first."""
OLD: Final = 1_024
"""Versions so much older than the newest one are not told apart."""
_CLASS: Final = log(1.5)
"""A class holds paces that differ by up to this factor's logarithm."""
_FASTEST_S: Final = 1e-9
_SLOWEST_S: Final = 1e9
"""Beyond these all paces are of one class."""


def speed_class(token_s: float) -> int:
    """The class of nodes that take so many seconds for a token of a completion."""
    return floor(
        log(token_s if _FASTEST_S < token_s < _SLOWEST_S else min(max(token_s, _FASTEST_S), _SLOWEST_S)) / _CLASS
    )


def slowest_token_s(speed: int) -> float:
    """Seconds a token takes at most in this class."""
    return exp(_CLASS * (speed + 1))


class Nodes:
    """All nodes that are connected, that hold leases, that rest, or that are remembered. Only where `samplers` is
    "by_version" are versions told apart; else all candidates count as of version 0."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._samplers = settings.samplers
        self._lease_size = settings.lease_size
        self._nodes: dict[str, Node] = {}
        self._left: OrderedDict[str, Node] = OrderedDict()
        self._queues = ReadyQueues()
        self._conduct = Conduct(deadline_s=settings.deadline_s)
        self._num_candidates = 0
        """Nodes that take work, full ones too."""
        self._by_version: Counter[int] = Counter()
        """These, by the version that they count with."""
        self._held: dict[str, int] = {}
        self._newest = 0
        self._strangers = Strangers(base=settings.unproven_most)
        self._origins = Origins()
        self._quarantined: set[str] = set()
        self._num_proven = 0
        """Proven nodes among the candidates."""
        self.num_connected = 0
        self.heeds_relief = True
        """Whether it matters that a node that has room anyhow has got rid of some work."""
        self.num_changes = 0
        """Grows whenever there may be a node for work for which there was none."""
        self.tokens_per_s = 0.0
        """Of all candidates together, as far as they are measured."""
        self._num_counted = 0
        """Candidates that are measured."""
        self._token_s = 0.0
        """The sum of each candidate's tokens_per_s times its token_s."""
        self._way_s = 0.0
        """The sum of each candidate's tokens_per_s times its way_s."""

    @property
    def num_known(self) -> int:
        """Nodes with a record here, those that are only remembered not counted."""
        return len(self._nodes)

    @property
    def held_by_node(self) -> Mapping[str, int]:
        """Rollouts leased to each node and not yet received; live."""
        return MappingProxyType(self._held)

    @property
    def num_ready(self) -> int:
        """Nodes that have room."""
        return len(self._queues)

    def notice_from(self, speed: float, *, most_avoided: int) -> None:
        """Until further notice nobody faster than this class is looked for who has returned something before, and no
        search leaves out more nodes than that."""
        self._queues.notice_from, self._queues.most_avoided = speed, most_avoided

    @property
    def unproven_wait(self) -> bool:
        """Whether nodes that have returned nothing yet have room, and may be given something."""
        return self._queues.num_unproven > 0 and self.unproven_may

    def slowest(self, oldest_version: int, enough: int) -> tuple[bool, int]:
        """Of the nodes that have room and this version or a newer one: whether any is of class `enough` or slower, and
        the slowest class of the others; UNPROVEN: there are none."""
        return self._queues.slowest(oldest_version, enough)

    @property
    def unproven_may(self) -> bool:
        """Whether nodes that have returned nothing yet are given anything."""
        return not self._num_proven or not self._strangers.is_full

    def room(self, node: Node) -> int:
        """Rollouts that may be leased to it at once."""
        return min(1, node.free) if self._is_on_trial(node) else node.free

    def _is_on_trial(self, node: Node) -> bool:
        """It has returned nothing yet, and others are there that have."""
        return not node.proven and self._num_proven > 0

    @property
    def any_ready(self) -> bool:
        """Whether any node has room."""
        return len(self._queues) > 0

    @property
    def typical_token_s(self) -> float:
        """Seconds a token takes in one completion, on average over what the pool draws; 0 = nothing is known."""
        return self._token_s / self.tokens_per_s if self.tokens_per_s > 0 else 0.0

    @property
    def typical_way_s(self) -> float:
        """Seconds that a completion is under way besides, likewise."""
        return self._way_s / self.tokens_per_s if self.tokens_per_s > 0 else 0.0

    @property
    def next_end_of_rest(self) -> float:
        """When somebody's rest is over; inf: nobody rests."""
        return self._conduct.next_end

    def is_connected(self, node_id: str) -> bool:
        node = self._nodes.get(node_id)
        return node is not None and node.connected

    def is_proven(self, node_id: str) -> bool:
        """Whether something that the node returned was scored, since the hub's start and as far as is remembered, and
        it is trusted."""
        node = self._nodes.get(node_id) or self._left.get(node_id)
        return node is not None and node.proven and node_id not in self._quarantined

    def is_quarantined(self, node_id: str) -> bool:
        return node_id in self._quarantined

    def quarantine(self, node_id: str) -> None:
        """It is given nothing from here on, whether it is known or not; what it had earned is lost."""
        self._quarantined.add(node_id)
        node = self._nodes.get(node_id)
        if node is not None:
            node.quarantined, node.window = True, 1
            self._update(node)

    def release_from_quarantine(self, node_id: str) -> None:
        """It may be given work again."""
        self._quarantined.discard(node_id)
        node = self._nodes.get(node_id)
        if node is not None:
            node.quarantined = False
            self._update(node)

    def published(self, policy_version: int) -> None:
        """This version is out: no claim of a newer one counts."""
        self._newest = policy_version

    def get(self, node_id: str) -> Node | None:
        """Its record, if it is known; others change it through this object alone."""
        return self._nodes.get(node_id)

    def ids(self) -> tuple[str, ...]:
        """All that are known, in the order in which they came, in O(nodes)."""
        return tuple(self._nodes)

    def set_active(self, node_id: str, active: bool) -> Node:
        """Whether it may be leased to; what it holds it may finish in any case."""
        node = self._nodes[node_id]
        node.active = active
        self._update(node)
        return node

    def connect(self, node_id: str, per_hour: float = 0.0, *, origin: str = "") -> None:
        """It takes no work until it reports a capacity; one that costs something, not before it is made active."""
        node = self._known(node_id)
        if node.has_place and node.origin != origin:
            self._leave_origin(node)
        node.origin = origin
        node.per_hour, node.active, node.told = per_hour, per_hour == 0, None
        self.num_connected += not node.connected
        node.connected, node.capacity, node.policy_version = True, 0, None
        self._update(node)

    def disconnect(self, node_id: str) -> None:
        node = self._nodes.get(node_id)
        if node is not None:
            self.num_connected -= node.connected
            node.connected = False
            self._update(node)

    def report(self, node_id: str, capacity: int, policy_version: int | None) -> None:
        """What the node says that it can do; ignored while it is not connected."""
        node = self._nodes.get(node_id)
        if node is not None and node.connected:
            node.capacity, node.policy_version = capacity, policy_version
            self._update(node)

    def fail(self, node_id: str, now: float) -> None:
        """The node gave work back, or sent something invalid."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.fail(node, now)
            self._update(node)

    def excuse(self, node_id: str) -> None:
        """What the node gave back was not its fault."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.excuse(node)
            self._update(node)

    def kill_scorer(self, node_id: str, group_id: int, now: float) -> None:
        """What the node sent for this group ended a process for scoring."""
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.kill_scorer(node, group_id, now)
            self._update(node)

    def trust(self, node_id: str, *, in_time: bool) -> None:
        """A rollout of the node is scored; it came before its deadline or after it."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        self._conduct.trust(node)
        if self._is_on_trial(node):
            # Its window grows from what it holds, or a key that is honest once could be gone with a first window's.
            node.window = min(node.window, max(1, node.in_flight))
        if not node.proven:
            self._count_in_flight(node, -node.in_flight)
            node.proven, node.speed = True, speed_class(node.pace.token_s)
            self._num_proven += node.candidate is not None
            self._count_in_flight(node, node.in_flight)
            if in_time:
                self._strangers.returned()
        if in_time and node.window < MAX_BATCHED:
            node.window += 1
        self._update(node)

    def wake(self, now: float) -> None:
        """Ends the rests that are over; where nobody else takes work, those for silence too."""
        if self._conduct.next_end > now and self._num_candidates:
            return
        for node in self._conduct.wake(now, all_silent=not self._num_candidates):
            self._update(node)

    def take(self, node_id: str, count: int, num_tokens: float, now: float) -> None:
        """`count` rollouts, `num_tokens` in all, are leased to it. A node that is not known yet is one from before a
        restart."""
        node = self._known(node_id)
        node.taken_at = now
        if node.held == 0:
            node.pace.begin(now)
        self._hold(node, count, num_tokens)
        self.num_changes += self._queues.to_the_end(node)
        self._update(node)

    def expire(self, node_id: str, now: float, *, was_late: bool = False) -> None:
        """One of its rollouts has passed its deadline. `was_late`: that it does not come is known already."""
        node = self._nodes[node_id]
        if not node.proven and not was_late:
            self._strangers.lost()
        node.overdue += 1
        self._count_in_flight(node, -1)
        if not node.is_hub:
            node.window = max(1, node.window - 1) if node.in_flight else 1
            self._count_pace(node, counts=False)
        self._conduct.expire(node, now)
        self._update(node)

    def release(self, node_id: str, num_tokens: float, *, overdue: bool, late: bool = False) -> None:
        """One of its rollouts, likely to be so long, has come in, or is wanted no more."""
        node = self._nodes[node_id]
        node.overdue -= overdue
        node.num_late -= late
        if not node.num_late:
            node.late_since = None
        self._count_in_flight(node, overdue)
        self._hold(node, -1, -num_tokens)
        if self.heeds_relief and self._queues.is_found(node):
            self.num_changes += 1
        self._update(node)

    def wait_for_check(self, node_id: str, count: int) -> None:
        """So many more of its rollouts wait for a check, or fewer."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.unchecked = max(0, node.unchecked + count)  # Of one that has left, nothing is remembered.
            if count < 0 and self.heeds_relief and self._queues.is_found(node):
                self.num_changes += 1
            self._update(node)

    def measure(self, node_id: str, num_tokens: int, *, sampling_s: float, latency_s: float, now: float) -> None:
        """A completion of it has come in; before `release`."""
        node = self._nodes[node_id]
        node.pace.arrived(num_tokens, sampling_s=sampling_s, latency_s=latency_s, held=node.held, now=now)
        if node.proven:
            node.speed = speed_class(node.pace.token_s)
        if node.candidate is not None:
            self._count_pace(node, counts=True)

    def miss(self, node_id: str, num_tokens: float, waited_s: float) -> None:
        """A completion that is likely to be so long has not come in. In less time than most nodes take that says
        nothing."""
        node = self._nodes[node_id]
        if not node.is_hub and waited_s > num_tokens * self.typical_token_s + self.typical_way_s:
            node.pace.missed(num_tokens, waited_s)
            if node.pace.token_s:
                node.speed = speed_class(node.pace.token_s)
            if node.candidate is not None:
                self._count_pace(node, counts=True)
            self._update(node)

    def mark_late(self, node_id: str, now: float) -> None:
        """A rollout that it holds takes too long, or it has left."""
        node = self._nodes[node_id]
        node.num_late += 1
        if node.late_since is None:
            node.late_since = now
        if not node.proven:
            self._strangers.lost()
            self._conduct.keep_waiting(node, now)
            self._update(node)

    def num_candidates(self, oldest_version: int, among: Collection[str] | None = None) -> int:
        """Nodes (of `among`, if given) that take work and have a version from `oldest_version` on, full ones too."""
        if among is not None:
            versions = [node.candidate for node_id in among if (node := self._nodes.get(node_id)) is not None]
            return sum(version is not None and version >= oldest_version for version in versions)
        if oldest_version <= 0:
            return self._num_candidates
        return sum(self._by_version[version] for version in range(oldest_version, self._newest + 1))

    def any_proven(self, beside: Collection[str]) -> bool:
        """Whether anyone takes work that has returned something, these left out; full ones count too."""
        nodes = [node for node_id in beside if (node := self._nodes.get(node_id)) is not None]
        return self._num_proven > sum(node.candidate is not None and node.proven for node in nodes)

    def next_ready(
        self,
        oldest_version: int,
        avoid: Collection[str],
        *,
        paces: tuple[float, float] | None = None,
        by_speed: bool = False,
        unproven_last: bool = False,
    ) -> Iterator[Node]:
        """The nodes to lease to, best first. `paces`: from the fastest to the slowest token_s that will do. `by_speed`:
        the fastest first. Those of whom nothing is known yet come before all others, or after them, as far as they may
        have work."""
        fastest, slowest = (UNPROVEN + 1, -UNPROVEN) if paces is None else map(speed_class, paces)
        if self.unproven_may and not unproven_last:
            yield from self._queues.first(oldest_version, fastest=UNPROVEN, slowest=UNPROVEN, avoid=avoid)
        yield from self._queues.first(oldest_version, fastest=fastest, slowest=slowest, avoid=avoid, by_speed=by_speed)
        if self.unproven_may and unproven_last:
            yield from self._queues.first(oldest_version, fastest=UNPROVEN, slowest=UNPROVEN, avoid=avoid)

    def _known(self, node_id: str) -> Node:
        node = self._nodes.get(node_id)
        if node is None:
            node = self._left.pop(node_id, None) or Node(node_id, self._settings.first_window)
            if node.is_hub:
                node.window = MAX_BATCHED
            node.quarantined = node_id in self._quarantined
            if node.quarantined:
                node.window = 1
            self._nodes[node_id] = node
        return node

    def _hold(self, node: Node, count: int, num_tokens: float) -> None:
        node.held += count
        self._count_in_flight(node, count)
        node.held_tokens = node.held_tokens + num_tokens if node.held else 0.0
        if node.held:
            self._held[node.node_id] = node.held
        else:
            self._held.pop(node.node_id, None)

    def _count_in_flight(self, node: Node, count: int) -> None:
        self.num_changes += self._strangers.count(count, is_stranger=not node.proven)

    def _count_pace(self, node: Node, *, counts: bool) -> None:
        """Keeps the pool's pace true to the node's."""
        pace, (rate_before, token_s_before, way_s_before) = node.pace, node.counted
        node.counted = (pace.tokens_per_s, pace.token_s, pace.way_s) if counts else (0.0, 0.0, 0.0)
        rate, token_s, way_s = node.counted
        self._num_counted += (rate > 0) - (rate_before > 0)
        if not self._num_counted:  # What sums have lost of their digits is no pace.
            self.tokens_per_s = self._token_s = self._way_s = 0.0
            return
        self.tokens_per_s += rate - rate_before
        self._token_s += rate * token_s - rate_before * token_s_before
        self._way_s += rate * way_s - rate_before * way_s_before

    def _update(self, node: Node) -> None:
        """Keeps candidates, queues and records true to the node."""
        version = self._version(node)
        if version != node.candidate:
            self._change_version(node, version)
        place = None if version is None else self._place(node, version)
        if self._queues.put(node, place):
            self.num_changes += node.speed != UNPROVEN or self.unproven_may
        if node.has_place and (node.proven or (place is None and node.held == node.overdue)):
            self._leave_origin(node)
        if not node.connected and node.held == 0 and node.rests_until is None:
            node_id = node.node_id
            del self._nodes[node_id]
            if node.proven:
                self._left[node_id] = node
                if len(self._left) > REMEMBERED:
                    self._left.popitem(last=False)

    def _leave_origin(self, node: Node) -> None:
        """Its place is another's, who may be given work at once."""
        origin = node.origin
        self._origins.leave(node)
        while (node_id := self._origins.next_waiting(origin)) is not None:
            other = self._nodes.get(node_id)
            if other is not None and other.origin == origin:
                self._update(other)
                if other.has_place:
                    return

    def _change_version(self, node: Node, version: int | None) -> None:
        """Another candidate by itself is nobody for whom there was no work: whether he has room is seen to apart. Where
        one goes, what was kept from others may be given to them."""
        before, node.candidate = node.candidate, version
        if before is not None:
            self._by_version[before] -= 1
            if not self._by_version[before]:
                del self._by_version[before]
        if version is None:
            self._num_candidates -= 1
            self.num_changes += 1
            self._num_proven -= node.proven
            self._count_pace(node, counts=False)
        else:
            self._by_version[version] += 1
            if before is None:
                self._num_candidates += 1
                self._num_proven += node.proven
                self._count_pace(node, counts=True)

    def _place(self, node: Node, version: int) -> Place | None:
        """Where it waits; None: it has no room."""
        limit = node.limit
        taken = node.held - node.overdue + node.unchecked
        free = limit - taken
        if free < 1 or (free < self._lease_size and free < limit // 4):
            return None
        if self._is_on_trial(node) and (taken or not self._origins.enter(node, self._strangers.may_hold)):
            return None
        return (version, 2 * taken >= limit, node.speed)

    def _version(self, node: Node) -> int | None:
        """What it counts as a candidate of; None: it takes no work."""
        if not node.connected or node.capacity < 1 or node.policy_version is None or node.rests_until is not None:
            return None
        if not node.active or node.quarantined:
            return None
        match self._samplers:
            case "by_version":
                if node.policy_version > self._newest:
                    return self._newest
                return node.policy_version if node.policy_version > self._newest - OLD else 0
            case "any":
                return 0
            case "hub":
                return 0 if node.is_hub else None
            case unknown:
                assert_never(unknown)
