"""Simulated engine of one node. It samples `width` rollouts at once; others wait in order of arrival.

Leases wait until their version has arrived at the node. The first rollout of a lease does the prefill of the prompt;
the others start when it is done. A rollout continued from another node first recomputes the given tokens, then samples
the rest. `take` and similar methods return the rollouts that began, or that continue with a newer version. Each ends at
its `ends_at`, unless it is stopped before or gets another end time.

If nodes may switch versions within a completion (`moves`), a lease begins with the node's newest version. When a newer
one arrives, `echo_shared.sampling.moving_on` decides whether to switch. Prompts and sampled tokens are then recomputed
with the newer version, in the same slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from echo_hub.simulator.population import Traits
from echo_hub.simulator.spans import Spans, first, grown, num_tokens
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling.moving_on import MovingOn
from echo_shared.wire.messages import MAX_VERSION_SPANS


@dataclass(slots=True, kw_only=True)
class Moves:
    """Parameters of a node that may switch to a newer version in the middle of a completion."""

    max_tokens: int
    prompt_tokens: int
    swap_s: float
    """Seconds in which the engine changes its version, in addition to the recomputation."""
    rule: MovingOn = field(default_factory=MovingOn)


class Sampling:
    """One rollout on one node. `given`: the tokens that the hub sent along, as spans. A span is a part of a completion,
    sampled by one node (this or another one) with one version."""

    __slots__ = (
        "before",
        "began_at",
        "draws_from",
        "ends_at",
        "given",
        "had",
        "index",
        "known",
        "lease",
        "policy_version",
        "stopped_at",
        "tokens",
    )

    def __init__(self, lease: HeldLease, index: int, tokens: int, given: Spans = ()) -> None:
        self.lease = lease
        self.index = index
        self.tokens = tokens
        self.given = num_tokens(given)
        """Number of tokens of earlier attempts that the hub sent with the lease."""
        self.before = given
        """Spans (parts sampled by one node with one version) of the tokens that exist when sampling begins or goes on,
        at `draws_from`."""
        self.had = self.given
        """Number of tokens in `before`."""
        self.policy_version = lease.version
        """Version with which the next tokens are sampled."""
        self.began_at = self.draws_from = self.ends_at = inf
        self.stopped_at = inf
        self.known: int | None = None
        """Number of tokens that the hub has, given ones included; None: as many as were streamed."""

    @property
    def stopped(self) -> bool:
        return self.stopped_at < inf

    def drawn(self, now: float) -> int:
        """Return the number of tokens that exist at `now`, given ones included."""
        until = min(now, self.stopped_at)
        if until >= self.ends_at:
            return self.tokens
        if until <= self.draws_from:
            return self.had
        token_s = (self.ends_at - self.draws_from) / (self.tokens - self.had)
        return min(self.tokens, self.had + int((until - self.draws_from) / token_s))

    def spans(self, count: int) -> Spans:
        """Return which nodes and versions sampled the first `count` tokens, which must exist."""
        more = DrawnSpan(
            node_id=self.lease.node.node_id, policy_version=self.policy_version, num_tokens=max(0, count - self.had)
        )
        return grown(first(self.before, count), more)

    def begin(self, draws_from: float, *, read_token_s: float, s_per_token: float) -> None:
        """Set the times at which this rollout's sampling begins and ends. From the argument `draws_from` on, the node
        first recomputes the existing tokens, and then samples the rest.
        """
        self.draws_from = draws_from + self.had * read_token_s
        self.ends_at = self.draws_from + (self.tokens - self.had) * s_per_token

    def move(self, policy_version: int, now: float) -> None:
        """Sample with this version from now on. If all tokens of a rollout exist already, its last token is sampled
        again.
        """
        count = min(self.drawn(now), self.tokens - 1)
        self.before, self.had, self.policy_version = self.spans(count), count, policy_version


class HeldLease:
    __slots__ = ("group_id", "lease_id", "needs", "node", "policy_version", "prefilled_at", "unfinished", "version")

    def __init__(self, *, node: SimulatedNode, lease_id: int, group_id: int, policy_version: int) -> None:
        self.node = node
        self.lease_id = lease_id
        self.group_id = group_id
        self.policy_version = policy_version
        self.needs = policy_version
        """Oldest version that may sample this lease: given tokens may be from a newer version than the lease names."""
        self.version = policy_version
        """Version with which the lease is sampled."""
        self.prefilled_at: float | None = None
        self.unfinished: dict[int, Sampling] = {}

    @property
    def versions(self) -> set[int]:
        """Versions that sampled the existing tokens of the unfinished rollouts."""
        return {span.policy_version for sampling in self.unfinished.values() for span in sampling.before}


class SimulatedNode:
    """A node and its connection. `session` counts connections, so that messages of earlier ones can be ignored."""

    __slots__ = (
        "connected",
        "connected_at",
        "connected_s",
        "fetching",
        "free",
        "gone_at",
        "held",
        "moves",
        "node_id",
        "num_begun",
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

    def __init__(self, node_id: str, number: int, traits: Traits, moves: Moves | None = None) -> None:
        """`moves` None: every rollout is finished with the version that it began with."""
        self.node_id = node_id
        self.number = number
        self.traits = traits
        self.moves = moves
        self.connected = False
        self.connected_at = 0.0
        self.connected_s = 0.0
        self.gone_at = inf
        """Virtual time at which the node disconnected; inf while it is connected."""
        self.paused = False
        """True while the node's owner uses the machine, so that the node takes no work."""
        self.session = 0
        self.policy_version = 0
        self.fetching: int | None = None
        self.num_begun = 0
        """Number of rollouts begun so far, plus the number of switches of running rollouts to a newer version."""
        self.free = traits.width
        self.held: dict[int, HeldLease] = {}
        self.queue: deque[Sampling] = deque()
        self.waiting: list[HeldLease] = []
        """Leases whose version has not arrived at the node yet."""
        self.spool: list[Sampling] = []
        """Rollouts that the node finished while it was disconnected."""
        self.sent_late: set[tuple[int, int]] = set()
        """(lease id, index) of the rollouts that finished while disconnected and were sent at the last reconnection."""

    @property
    def capacity(self) -> int:
        """Number of rollouts that the node claims to accept."""
        return 0 if self.paused else self.traits.capacity

    def take(self, lease: HeldLease, now: float) -> list[Sampling]:
        """Accept a lease; return the rollouts that begin now."""
        self.held[lease.lease_id] = lease
        if lease.needs > self.policy_version:
            self.waiting.append(lease)
            return []
        if self.moves is not None:
            lease.version = self.policy_version
            for sampling in lease.unfinished.values():
                sampling.policy_version = lease.version
        self.queue.extend(lease.unfinished.values())
        return self._begin(now)

    def version_came(self, policy_version: int, now: float) -> list[Sampling]:
        self.policy_version = policy_version
        waiting, self.waiting = self.waiting, []
        begun = [began for lease in waiting if lease.lease_id in self.held for began in self.take(lease, now)]
        return begun + self.move_on(now)

    def move_on(self, now: float) -> list[Sampling]:
        """Switch running leases to the newest version, if `moving_on` finds that worthwhile; return the rollouts with a
        new end time."""
        moving, moves, traits = self._moving, self.moves, self.traits
        if not moving or moves is None:
            return []
        there = {sampling: sampling.drawn(now) for lease in moving for sampling in lease.unfinished.values()}
        left = max(moves.max_tokens - count for count in there.values())
        if not moves.rule.is_due(left, token_s=traits.s_per_token, now=now):
            return []
        read = sum(moves.prompt_tokens + count for count in there.values())
        moves.rule.moved(read, tokens_per_s=traits.width / traits.s_per_token, now=now)
        moved: list[Sampling] = []
        for lease in moving:
            lease.version, lease.prefilled_at = self.policy_version, None
            for sampling in lease.unfinished.values():
                sampling.move(self.policy_version, now)
                if sampling.began_at < inf:
                    self._draw(sampling, now + moves.swap_s)
                    moved.append(sampling)
        return moved

    @property
    def moves_at(self) -> float:
        """Time from which running leases may switch to the newest version; inf if none may."""
        return self.moves.rule.not_before if self.moves is not None and self._moving else inf

    @property
    def _moving(self) -> list[HeldLease]:
        if self.moves is None:
            return []
        return [
            lease
            for lease in self.held.values()
            if lease.version < self.policy_version
            and lease not in self.waiting
            and len(lease.versions) < MAX_VERSION_SPANS
        ]

    def finish(self, sampling: Sampling, now: float) -> list[Sampling]:
        """Free the slot of a finished rollout; return the rollouts that begin now."""
        lease = sampling.lease
        del lease.unfinished[sampling.index]
        if not lease.unfinished:
            del self.held[lease.lease_id]
        self.free += 1
        return self._begin(now)

    def stop(self, lease_id: int, now: float) -> list[Sampling]:
        """Drop the unfinished rollouts of a lease, if any; return the rollouts that begin now."""
        lease = self.held.pop(lease_id, None)
        if lease is None:
            return []
        for sampling in lease.unfinished.values():
            sampling.stopped_at = now
            self.free += sampling.began_at < inf
        return self._begin(now)

    def stop_all(self, now: float) -> list[HeldLease]:
        held = list(self.held.values())
        for lease in held:
            for sampling in lease.unfinished.values():
                sampling.stopped_at = now
        self.held, self.waiting, self.free = {}, [], self.traits.width
        self.queue.clear()
        return held

    def streamed_at(self, now: float, stream_s: float) -> float:
        """Return the time of the last streamed progress report that the hub has by now; -inf if there is none."""
        if not stream_s:
            return -inf
        until = min(now, self.gone_at)
        phase = self.number * _GOLDEN % 1.0 * stream_s  # Spread the reports of nodes over time.
        streamed_at = (until + phase) // stream_s * stream_s - phase
        return max(streamed_at, self.connected_at) if self.connected else streamed_at

    def _begin(self, now: float) -> list[Sampling]:
        begun: list[Sampling] = []
        while self.free and self.queue:
            sampling = self.queue.popleft()
            if sampling.stopped:
                continue
            sampling.began_at = now
            self._draw(sampling, now)
            self.free -= 1
            begun.append(sampling)
        return begun

    def _draw(self, sampling: Sampling, now: float) -> None:
        """Start or continue a rollout in a slot: prefill the prompt, unless another rollout of its lease has done so,
        and recompute existing tokens."""
        lease, traits = sampling.lease, self.traits
        if lease.prefilled_at is None:
            lease.prefilled_at = now + traits.prefill_s
        pace = traits.paces[self.num_begun % len(traits.paces)] if traits.paces else traits.s_per_token
        self.num_begun += 1
        sampling.begin(max(now, lease.prefilled_at), read_token_s=traits.prefill_token_s, s_per_token=pace)


_GOLDEN = 0.6180339887498949
