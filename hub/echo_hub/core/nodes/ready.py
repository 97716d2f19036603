"""All nodes, their free capacity, and the choice of the next node for a lease.

A node earns its *window*, the number of rollouts it may hold. The window starts small. Each rollout that is returned in
time and scored adds one, or `RAMP` - 1 while the node's results come back as soon as it promised (see `pace`); each
rollout that passes its deadline takes one away. A node's claimed capacity is only an upper bound. A node is *proven*
once a rollout of it was scored. While any proven node is present, an unproven node gets one lease. This lease has
one rollout, or more if the node claims a high speed. `strangers` limits the rollouts of all unproven nodes together.

A node is *ready* if a quarter of the rollouts that it may hold are free, or a whole lease fits. If a lease were made
for each single free rollout, every lease would be one rollout long. Multi-turn runs mostly have such leases anyway, so
there one free rollout is enough. Overdue rollouts use no capacity, because the node may have lost them.

Ready nodes wait in queues by version and speed class (see `queues`), so that urgent work finds fast nodes. A resting
node (one that pauses after misbehaviour, see `conduct`) gets no work, whatever it reports.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Final, assert_never

from echo_hub.core.nodes.conduct import Conduct
from echo_hub.core.nodes.node import UNPROVEN, Node, NodeSettings, Place
from echo_hub.core.nodes.pace import RAMP
from echo_hub.core.nodes.queues import ReadyQueues
from echo_hub.core.nodes.speed_classes import speed_class
from echo_hub.core.nodes.strangers import Origins, Strangers
from echo_hub.core.nodes.unwilling import UnwillingNodes
from echo_shared.wire.messages import MAX_BATCHED

REMEMBERED: Final = 65_536
"""Number of departed proven nodes whose window and measured speed are kept. The longest absent are forgotten first."""
OLD: Final = 1_024
"""A node that lags the newest version by this number of versions counts as having version 0."""


class Nodes:
    """All nodes that are connected, hold leases, rest after misbehaviour, or have left and are remembered. Only with
    `samplers` "by_version" do nodes count under their own version; otherwise all count as version 0."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._samplers = settings.samplers
        self._lease_size = settings.lease_size
        self._nodes: dict[str, Node] = {}
        self._left: OrderedDict[str, Node] = OrderedDict()
        self._queues = ReadyQueues()
        self._conduct = Conduct(deadline_s=settings.deadline_s)
        self.unwilling = UnwillingNodes()
        self._num_candidates = 0
        """Number of candidates: nodes that take work, including those without free capacity."""
        self._by_version: Counter[int] = Counter()
        """Number of candidates (nodes that take work) by the version that they count under."""
        self._held: dict[str, int] = {}
        self._newest = 0
        self._strangers = Strangers(base=settings.unproven_most)
        self._origins = Origins()
        self._quarantined: set[str] = set()
        self._num_proven = 0
        """Number of proven nodes that take work."""
        self.num_connected = 0
        self.heeds_relief = True
        """True if more free capacity of a node that is already ready can lead to a lease. While False, more free
        capacity of a ready node does not raise `num_changes`."""
        self.num_changes = 0
        """Counter that grows whenever a node may have become able to take work for which no node was found before."""
        self.tokens_per_s = 0.0
        """Total tokens per second of all candidates (nodes that take work) of known speed."""
        self._num_counted = 0
        """Number of candidates (nodes that take work) of known speed."""
        self._token_s = 0.0
        """Sum over candidates (nodes that take work) of tokens_per_s · token_s, with the seconds per token of one
        completion."""
        self._way_s = 0.0
        """Sum over candidates (nodes that take work) of tokens_per_s · way_s, with the transit seconds of a
        completion."""

    @property
    def num_known(self) -> int:
        """Return the number of node records. Departed nodes do not count if only their window and speed are kept."""
        return len(self._nodes)

    @property
    def held_by_node(self) -> Mapping[str, int]:
        """Return the number of unreceived rollouts leased to each node, as a live view."""
        return MappingProxyType(self._held)

    @property
    def num_ready(self) -> int:
        return len(self._queues)

    def notice_from(self, speed: float, *, most_avoided: int) -> None:
        """Count no changes of proven nodes in a faster speed class than `speed`, until the next call: no work suits
        them now. `most_avoided`: largest number of nodes that one search skips."""
        self._queues.notice_from, self._queues.most_avoided = speed, most_avoided

    @property
    def unproven_wait(self) -> bool:
        """True if unproven nodes have free capacity and may get work."""
        return self._queues.num_unproven > 0 and self.unproven_may

    def slowest(self, oldest_version: int, enough: int) -> tuple[bool, int]:
        """Examine the ready nodes of this version or newer. Return True if one of them is of speed class `enough` or
        slower. Also return the slowest class among the nodes that are faster than `enough` (UNPROVEN: there are
        none)."""
        return self._queues.slowest(oldest_version, enough)

    @property
    def unproven_may(self) -> bool:
        """True if unproven nodes may get work: no proven node takes work, or all unproven ones together are below their
        limit."""
        return not self._num_proven or not self._strangers.is_full

    def room(self, node: Node) -> int:
        """Return how many rollouts the node's next lease may have."""
        unclaimed = min(1, node.free) if self._is_on_trial(node) else node.free
        if node.proven or node.in_flight or node.unchecked or not node.pace.promised_per_s:
            return unclaimed
        # By its claim, the node samples `in_time` rollouts in the time in which a typical node samples one.
        in_time = node.pace.promised_per_s * self.typical_token_s if self.typical_token_s else inf
        # By default a node asks for twice the rollouts that it samples in parallel, so half of its capacity keeps it
        # busy.
        return max(unclaimed, int(min(in_time, node.capacity // 2, self._strangers.most_for_one)))

    def _is_on_trial(self, node: Node) -> bool:
        return not node.proven and self._num_proven > 0

    @property
    def any_ready(self) -> bool:
        return len(self._queues) > 0

    @property
    def typical_token_s(self) -> float:
        """Return the pool's average seconds per token in one completion, weighted by tokens; 0 = unknown."""
        return self._token_s / self.tokens_per_s if self.tokens_per_s > 0 else 0.0

    @property
    def typical_way_s(self) -> float:
        """Return the pool's average transit seconds per completion, weighted by tokens; 0 = unknown."""
        return self._way_s / self.tokens_per_s if self.tokens_per_s > 0 else 0.0

    @property
    def next_end_of_rest(self) -> float:
        """Return the earliest time at which a node's rest (pause without work) may end; inf: no node rests."""
        return self._conduct.next_end

    def is_connected(self, node_id: str) -> bool:
        node = self._nodes.get(node_id)
        return node is not None and node.connected

    def is_proven(self, node_id: str) -> bool:
        """Return True if the node is not quarantined and a rollout of it was scored, as far as this hub process
        remembers."""
        node = self._nodes.get(node_id) or self._left.get(node_id)
        return node is not None and node.proven and node_id not in self._quarantined

    def is_quarantined(self, node_id: str) -> bool:
        return node_id in self._quarantined

    def quarantine(self, node_id: str) -> None:
        """Exclude the node from all work, also while it is disconnected. Reset its window, the number of rollouts that
        it may hold, to one."""
        self._quarantined.add(node_id)
        node = self._nodes.get(node_id)
        if node is not None:
            node.quarantined, node.window = True, 1
            self._update(node)

    def release_from_quarantine(self, node_id: str) -> None:
        self._quarantined.discard(node_id)
        node = self._nodes.get(node_id)
        if node is not None:
            node.quarantined = False
            self._update(node)

    def published(self, policy_version: int) -> None:
        """Note the newest published version. Claims of newer versions count as this one."""
        self._newest = policy_version

    def get(self, node_id: str) -> Node | None:
        """Return the node's record, if any. Only this object may change it."""
        return self._nodes.get(node_id)

    def ready(self, node_id: str) -> Node | None:
        """Return the node if it may get a lease now; otherwise None."""
        node = self._nodes.get(node_id)
        return node if node and node.place is not None and (node.proven or self.unproven_may) else None

    def ids(self) -> tuple[str, ...]:
        """Return the ids of all recorded nodes, in order of arrival, in O(nodes)."""
        return tuple(self._nodes)

    def set_active(self, node_id: str, active: bool) -> Node:
        """Allow or forbid leases to the node, which may finish its current leases in any case."""
        node = self._nodes[node_id]
        node.active = active
        self._update(node)
        return node

    def connect(self, node_id: str, per_hour: float = 0.0, *, origin: str = "") -> None:
        """Add a connected node. It takes no work before its first report; a priced node also waits for activation."""
        node = self._known(node_id)
        if node.has_place and node.origin != origin:
            self._leave_origin(node)
        node.origin = origin
        node.per_hour, node.active, node.told = per_hour, per_hour == 0, None
        node.pace.connect()
        self.num_connected += not node.connected
        node.connected, node.capacity, node.policy_version = True, 0, None
        self._update(node)

    def disconnect(self, node_id: str) -> None:
        node = self._nodes.get(node_id)
        if node is not None:
            self.num_connected -= node.connected
            node.connected = False
            self._update(node)

    def report(self, node_id: str, capacity: int, policy_version: int | None, *, tokens_per_s: float = 0.0) -> None:
        """Store the node's reported capacity, version and speed. Reports of disconnected nodes are ignored."""
        node = self._nodes.get(node_id)
        if node is not None and node.connected:
            node.capacity, node.policy_version = capacity, policy_version
            node.pace.promise(tokens_per_s, capacity)
            self._update(node)

    def fail(self, node_id: str, now: float) -> None:
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.fail(node, now)
            self._update(node)

    def excuse(self, node_id: str) -> None:
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.excuse(node)
            self._update(node)

    def kill_scorer(self, node_id: str, group_id: int, now: float) -> None:
        node = self._nodes.get(node_id)
        if node is not None:
            self._conduct.kill_scorer(node, group_id, now)
            self._update(node)

    def trust(self, node_id: str, *, in_time: bool) -> None:
        """Note a scored rollout of the node: the node is proven from now on. `in_time`: it was received before its
        deadline, so the window grows."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        self._conduct.trust(node)
        if self._is_on_trial(node):
            # Until now the node was allowed one lease. Let its window grow from the rollouts that it still holds: one
            # honest rollout must not unlock a whole first window.
            node.window = min(node.window, max(1, node.in_flight))
        if not node.proven:
            self._count_in_flight(node, -node.in_flight)
            node.proven, node.speed = True, speed_class(node.pace.token_s)
            self._num_proven += node.candidate is not None
            self._count_in_flight(node, node.in_flight)
            if in_time:
                self._strangers.returned()
        if in_time:
            node.window = min(MAX_BATCHED, node.window + (RAMP - 1 if node.pace.promised_per_s else 1))
        self._update(node)

    def wake(self, now: float) -> None:
        """End the rests (pauses after misbehaviour) that are over. If no node takes work, also end all rests of nodes
        whose rollouts only expired or are late."""
        if self._conduct.next_end > now and self._num_candidates:
            return
        for node in self._conduct.wake(now, all_silent=not self._num_candidates):
            self._update(node)

    def take(self, node_id: str, count: int, num_tokens: float, now: float) -> None:
        """Count `count` more rollouts as held by the node, with an expected total length of `num_tokens` tokens. A node
        without a record gets one: the node held the rollouts before a restart."""
        node = self._known(node_id)
        node.taken_at = now
        if node.held == 0:
            node.pace.begin(now)
        self._hold(node, count, num_tokens)
        self.num_changes += self._queues.to_the_end(node)
        self._update(node)

    def expire(self, node_id: str, now: float, *, was_late: bool = False) -> None:
        """Note that a rollout of the node has passed its deadline. `was_late`: the rollout was already marked late, so
        `Strangers` has already counted it as lost."""
        node = self._nodes[node_id]
        if not node.proven and not was_late:
            self._strangers.lost()
        node.overdue += 1
        node.pace.break_promise()
        self._count_in_flight(node, -1)
        if not node.is_hub:
            node.window = max(1, node.window - 1) if node.in_flight else 1
            self._count_pace(node, counts=False)
        self._conduct.expire(node, now)
        self._update(node)

    def release(self, node_id: str, num_tokens: float, *, overdue: bool, late: bool = False) -> None:
        """Release one held rollout of expected length `num_tokens`, because it arrived or is no longer wanted."""
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
        """Change by `count` the number of the node's rollouts that wait for a check. These rollouts use the node's
        capacity."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.unchecked = max(0, node.unchecked + count)  # A node that returned has a new record, which starts at 0.
            if count < 0 and self.heeds_relief and self._queues.is_found(node):
                self.num_changes += 1
            self._update(node)

    def measure(self, node_id: str, num_tokens: int, *, sampling_s: float, latency_s: float, now: float) -> None:
        """Update the node's measured speed with an arrived completion of `num_tokens`. Call this before `release`,
        while the completion still counts as held."""
        node = self._nodes[node_id]
        node.pace.arrived(num_tokens, sampling_s=sampling_s, latency_s=latency_s, held=node.held, now=now)
        if node.proven:
            node.speed = speed_class(node.pace.token_s)
        if node.candidate is not None:
            self._count_pace(node, counts=True)

    def miss(self, node_id: str, num_tokens: float, waited_s: float) -> None:
        """Lower the node's measured speed because a completion of expected length `num_tokens` has not arrived after
        `waited_s`. A wait shorter than a typical node's time proves nothing and is ignored."""
        node = self._nodes[node_id]
        if not node.is_hub and waited_s > num_tokens * self.typical_token_s + self.typical_way_s:
            node.pace.missed(num_tokens, waited_s)
            if node.pace.token_s:
                node.speed = speed_class(node.pace.token_s)
            if node.candidate is not None:
                self._count_pace(node, counts=True)
            self._update(node)

    def mark_late(self, node_id: str, now: float) -> None:
        """Note that one of the node's held rollouts takes too long, or that the node has left."""
        node = self._nodes[node_id]
        node.num_late += 1
        if node.late_since is None:
            node.late_since = now
        if not node.proven:
            self._strangers.lost()
            self._conduct.keep_waiting(node, now)
            self._update(node)

    def num_candidates(self, oldest_version: int, among: Collection[str] | None = None) -> int:
        """Return the number of nodes (of `among`, if given) that take work and have version `oldest_version` or newer,
        with or without free capacity."""
        if among is not None:
            versions = [node.candidate for node_id in among if (node := self._nodes.get(node_id)) is not None]
            return sum(version is not None and version >= oldest_version for version in versions)
        if oldest_version <= 0:
            return self._num_candidates
        return sum(self._by_version[version] for version in range(oldest_version, self._newest + 1))

    def any_proven(self, beside: Collection[str]) -> bool:
        """Return True if any proven node that is not in `beside` takes work, with or without free capacity."""
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
        """Yield the nodes for a lease, best first. `paces`: fastest and slowest acceptable seconds per token.
        `by_speed`: prefer fast nodes to long waiting ones. Unproven nodes come first, or last with `unproven_last`, if
        they may get work at all."""
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
        """Replace the node's share in the sums over all nodes by its current figures; without `counts`, remove its
        share."""
        pace, (rate_before, token_s_before, way_s_before) = node.pace, node.counted
        node.counted = (pace.tokens_per_s, pace.token_s, pace.way_s) if counts else (0.0, 0.0, 0.0)
        rate, token_s, way_s = node.counted
        self._num_counted += (rate > 0) - (rate_before > 0)
        if not self._num_counted:  # Reset the sums: rounding errors would look like a speed.
            self.tokens_per_s = self._token_s = self._way_s = 0.0
            return
        self.tokens_per_s += rate - rate_before
        self._token_s += rate * token_s - rate_before * token_s_before
        self._way_s += rate * way_s - rate_before * way_s_before

    def _update(self, node: Node) -> None:
        """Update the candidate counts, the queues and the set of records after a change of the node."""
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
        """Free the node's place, one of those that limit the unproven nodes of an origin, and give it to the next
        waiting node of this origin."""
        origin = node.origin
        self._origins.leave(node)
        while (node_id := self._origins.next_waiting(origin)) is not None:
            other = self._nodes.get(node_id)
            if other is not None and other.origin == origin:
                self._update(other)
                if other.has_place:
                    return

    def _change_version(self, node: Node, version: int | None) -> None:
        """Count the node as a candidate (a node that takes work) under another version; None: as none. If a node stops
        being a candidate, `num_changes` grows, because work that failed on all remaining nodes may now return to
        them."""
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
        limit = node.limit
        taken = node.held - node.overdue + node.unchecked
        free = limit - taken
        if free < 1 or (free < self._lease_size and free < limit // 4):
            return None
        if self._is_on_trial(node) and (taken or not self._origins.enter(node, self._strangers.may_hold)):
            return None
        return (version, 2 * taken >= limit, node.speed)

    def _version(self, node: Node) -> int | None:
        """Return the version under which the node counts as a candidate (able to take work); None: it takes no work."""
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
