"""One node's engine: `width` rollouts at once, the others wait in the order in which they came.

A lease that names a version which the node does not have yet waits until it has come. The first member of a lease that
begins computes the prompt; the others begin to draw once that is done. Who goes on with what another node has drawn
computes that too, and draws the rest. What `take` and the other calls give back has begun, and ends at its `ends_at`
unless it is stopped before.
"""

from __future__ import annotations

from collections import deque
from math import inf

from echo_hub.simulator.population import Traits


class Sampling:
    """One rollout on one node. `given`: tokens that were drawn before, by another node or by this one."""

    __slots__ = ("began_at", "draws_from", "ends_at", "given", "index", "known", "lease", "stopped_at", "tokens")

    def __init__(self, lease: HeldLease, index: int, tokens: int, given: int = 0) -> None:
        self.lease = lease
        self.index = index
        self.tokens = tokens
        self.given = given
        self.began_at = self.draws_from = self.ends_at = inf
        self.stopped_at = inf
        self.known: int | None = None
        """Tokens of it that the hub has, those given included; None: what was streamed."""

    @property
    def stopped(self) -> bool:
        return self.stopped_at < inf

    def drawn(self, now: float) -> int:
        """Tokens that are there of it, those given included."""
        until = min(now, self.stopped_at)
        if until >= self.ends_at:
            return self.tokens
        if until <= self.draws_from:
            return self.given
        token_s = (self.ends_at - self.draws_from) / (self.tokens - self.given)
        return min(self.tokens, self.given + int((until - self.draws_from) / token_s))


class HeldLease:
    """A lease that a node has, with what is unfinished of it."""

    __slots__ = ("group_id", "lease_id", "node", "policy_version", "prefilled_at", "unfinished")

    def __init__(self, *, node: SimulatedNode, lease_id: int, group_id: int, policy_version: int) -> None:
        self.node = node
        self.lease_id = lease_id
        self.group_id = group_id
        self.policy_version = policy_version
        self.prefilled_at: float | None = None
        self.unfinished: dict[int, Sampling] = {}


class SimulatedNode:
    """A node with its connection. `session` counts connections: what was said in an earlier one is void."""

    __slots__ = (
        "connected",
        "connected_at",
        "connected_s",
        "fetching",
        "free",
        "gone_at",
        "held",
        "node_id",
        "number",
        "paused",
        "policy_version",
        "queue",
        "sent_late",
        "session",
        "spool",
        "traits",
        "waiting",
    )

    def __init__(self, node_id: str, number: int, traits: Traits) -> None:
        self.node_id = node_id
        self.number = number
        self.traits = traits
        self.connected = False
        self.connected_at = 0.0
        self.connected_s = 0.0
        self.gone_at = inf
        """Since when it is not connected; inf: it is."""
        self.paused = False
        """Its owner wants it for himself."""
        self.session = 0
        self.policy_version = 0
        self.fetching: int | None = None
        self.free = traits.width
        self.held: dict[int, HeldLease] = {}
        self.queue: deque[Sampling] = deque()
        self.waiting: list[HeldLease] = []
        """Leases of versions that it does not have yet."""
        self.spool: list[Sampling] = []
        """Finished while it had no connection."""
        self.sent_late: set[tuple[int, int]] = set()
        """Lease and index of what it sent when it came back the last time."""

    @property
    def capacity(self) -> int:
        """What it says that it is willing to hold."""
        return 0 if self.paused else self.traits.capacity

    def take(self, lease: HeldLease, now: float) -> list[Sampling]:
        """A lease has arrived."""
        self.held[lease.lease_id] = lease
        if lease.policy_version > self.policy_version:
            self.waiting.append(lease)
            return []
        self.queue.extend(lease.unfinished.values())
        return self._begin(now)

    def version_came(self, policy_version: int, now: float) -> list[Sampling]:
        self.policy_version = policy_version
        waiting, self.waiting = self.waiting, []
        return [began for lease in waiting if lease.lease_id in self.held for began in self.take(lease, now)]

    def finish(self, sampling: Sampling, now: float) -> list[Sampling]:
        """A rollout has come to its end: its slot is free."""
        lease = sampling.lease
        del lease.unfinished[sampling.index]
        if not lease.unfinished:
            del self.held[lease.lease_id]
        self.free += 1
        return self._begin(now)

    def stop(self, lease_id: int, now: float) -> list[Sampling]:
        """What is unfinished of a lease is not wanted any more; harmless when nothing is."""
        lease = self.held.pop(lease_id, None)
        if lease is None:
            return []
        for sampling in lease.unfinished.values():
            sampling.stopped_at = now
            self.free += sampling.began_at < inf
        return self._begin(now)

    def stop_all(self, now: float) -> list[HeldLease]:
        """Forgets all that is unfinished: what that was."""
        held = list(self.held.values())
        for lease in held:
            for sampling in lease.unfinished.values():
                sampling.stopped_at = now
        self.held, self.waiting, self.free = {}, [], self.traits.width
        self.queue.clear()
        return held

    def streamed_at(self, now: float, stream_s: float) -> float:
        """When it last sent what its unfinished rollouts have drawn, as of what the hub has by now; -inf: never."""
        if not stream_s:
            return -inf
        until = min(now, self.gone_at)
        phase = self.number * _GOLDEN % 1.0 * stream_s  # Nodes do not all send at once.
        streamed_at = (until + phase) // stream_s * stream_s - phase
        return max(streamed_at, self.connected_at) if self.connected else streamed_at

    def _begin(self, now: float) -> list[Sampling]:
        """Fills the free slots."""
        begun: list[Sampling] = []
        while self.free and self.queue:
            sampling = self.queue.popleft()
            if sampling.stopped:
                continue
            lease, traits = sampling.lease, self.traits
            if lease.prefilled_at is None:
                lease.prefilled_at = now + traits.prefill_s
            sampling.began_at = now
            sampling.draws_from = max(now, lease.prefilled_at) + sampling.given * traits.prefill_token_s
            sampling.ends_at = sampling.draws_from + (sampling.tokens - sampling.given) * traits.s_per_token
            self.free -= 1
            begun.append(sampling)
        return begun


_GOLDEN = 0.6180339887498949
