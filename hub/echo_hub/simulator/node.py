"""One node's engine: `width` rollouts at once, the others wait in the order in which they came.

A lease that needs a version which the node does not have yet waits until it has come. The first member of a lease that
begins computes the prompt; the others begin to draw once that is done. Who goes on with what another node has drawn
computes that too, and draws the rest. What `take` and the other calls give back has begun, or goes on by a newer
version; it ends at its `ends_at` unless it is stopped before, or has got another one meanwhile.

Where the run interrupts completions (`moves`), a lease begins by the newest version that the node has, and goes on by a
newer one when that comes, if `echo_shared.moving_on` finds it worth while: prompts and what is drawn are read again, in
the slots that they are in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from echo_hub.simulator.population import Traits
from echo_hub.simulator.spans import Spans, first, grown, num_tokens
from echo_shared.messages import MAX_VERSION_SPANS
from echo_shared.moving_on import MovingOn
from echo_shared.rollout_books import DrawnSpan


@dataclass(slots=True, kw_only=True)
class Moves:
    """What a node goes by when a newer version comes in mid-completion."""

    max_tokens: int
    """No completion is longer."""
    prompt_tokens: int
    swap_s: float
    """Until the engine has changed versions, besides reading."""
    rule: MovingOn = field(default_factory=MovingOn)


class Sampling:
    """One rollout on one node. `given`: what was drawn before, by another node or by this one."""

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
        """Tokens."""
        self.before = given
        """Who drew what is there at `draws_from`, and by which versions."""
        self.had = self.given
        """Tokens of `before`."""
        self.policy_version = lease.version
        """By which it draws on."""
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
            return self.had
        token_s = (self.ends_at - self.draws_from) / (self.tokens - self.had)
        return min(self.tokens, self.had + int((until - self.draws_from) / token_s))

    def spans(self, count: int) -> Spans:
        """Who drew the first `count` tokens, which are there, and by which versions."""
        more = DrawnSpan(
            node_id=self.lease.node.node_id, policy_version=self.policy_version, num_tokens=max(0, count - self.had)
        )
        return grown(first(self.before, count), more)

    def begin(self, draws_from: float, *, read_token_s: float, s_per_token: float) -> None:
        """Reads what is there, each token in so much time, and draws the rest."""
        self.draws_from = draws_from + self.had * read_token_s
        self.ends_at = self.draws_from + (self.tokens - self.had) * s_per_token

    def move(self, policy_version: int, now: float) -> None:
        """What it draws from here on is by this version; one token at least is left."""
        count = min(self.drawn(now), self.tokens - 1)
        self.before, self.had, self.policy_version = self.spans(count), count, policy_version


class HeldLease:
    """A lease that a node has, with what is unfinished of it."""

    __slots__ = ("group_id", "lease_id", "needs", "node", "policy_version", "prefilled_at", "unfinished", "version")

    def __init__(self, *, node: SimulatedNode, lease_id: int, group_id: int, policy_version: int) -> None:
        self.node = node
        self.lease_id = lease_id
        self.group_id = group_id
        self.policy_version = policy_version
        """That it names."""
        self.needs = policy_version
        """The oldest version that may draw it: what it goes on with may be by a newer one than it names."""
        self.version = policy_version
        """By which it is drawn."""
        self.prefilled_at: float | None = None
        self.unfinished: dict[int, Sampling] = {}

    @property
    def versions(self) -> set[int]:
        """That have drawn any of what is unfinished."""
        return {span.policy_version for sampling in self.unfinished.values() for span in sampling.before}


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
        """`moves` None: what it draws it draws to its end by the version that it began with."""
        self.node_id = node_id
        self.number = number
        self.traits = traits
        self.moves = moves
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
        self.num_begun = 0
        """Rollouts that it has begun to draw, those included that it goes on with."""
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
        """What runs by an older version goes on by the newest, where that is due."""
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
        """When what runs by an older version may go on by the newest; inf: nothing does."""
        return self.moves.rule.not_before if self.moves is not None and self._moving else inf

    @property
    def _moving(self) -> list[HeldLease]:
        """The leases that run by an older version than there is, and may go on by that."""
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
            sampling.began_at = now
            self._draw(sampling, now)
            self.free -= 1
            begun.append(sampling)
        return begun

    def _draw(self, sampling: Sampling, now: float) -> None:
        """It is in a slot: its prompt is read, if nobody of its lease has read it, and what is there of it."""
        lease, traits = sampling.lease, self.traits
        if lease.prefilled_at is None:
            lease.prefilled_at = now + traits.prefill_s
        pace = traits.paces[self.num_begun % len(traits.paces)] if traits.paces else traits.s_per_token
        self.num_begun += 1
        sampling.begin(max(now, lease.prefilled_at), read_token_s=traits.prefill_token_s, s_per_token=pace)


_GOLDEN = 0.6180339887498949
