"""What nodes have drawn of rollouts that are not finished, in memory, so that another node can go on with them.

    node a: lease 7, index 0:  [5 9 2] [8 8] ... gone        node b: lease 9, index 0, prefix [5 9 2 8 8]: [4] [1] ...

Told of leases, their ends and every part, in the order of their happening. A part is taken when it goes on where the
last one ended; what it repeats must be as it was. Any other is refused and counted by reason: it costs its own node a
prefix, and nobody a connection. What is kept is a claim, as a rollout is: whether it was drawn honestly is checked on
the finished one. It is lost when the hub ends, and sent again by the nodes when it is back.

Who goes on sends the whole completion, and does not answer for what it was given: that must come back as it was, and
the finished rollout says who drew how much of it. Of a lease that is not kept any more, or that is from before the
hub's start, what was given is not known: all of its completion counts as its own node's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

from echo_hub.core.effects import SendLease
from echo_hub.core.payload import Span
from echo_hub.core.snapshot import RolloutRow
from echo_hub.scoring.checks import LOGPROB_SLACK, SamplingBounds
from echo_shared.messages import MAX_PREFIX_TOKENS, ReceiptState, Rollout, RolloutPart
from echo_shared.sampling import Prefix

BUDGET_BYTES: Final = 128 * 2**20
"""Sixteen million tokens."""
ROLLOUT_BYTES: Final = 512
"""What a rollout takes besides its tokens, its share of its lease included."""

_Drawers = tuple[tuple[str, int], ...]
"""Nodes and how many tokens each drew, one after the other."""


@dataclass(frozen=True, slots=True)
class _Origin:
    lease_id: int
    """The earlier lease that the rollout goes on with."""
    drawn_by: _Drawers


_NEW: Final[Mapping[int, _Origin]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What is known of a finished rollout beside what its node says."""

    spans: tuple[Span, ...]
    problem: str = ""
    """What contradicts what its node was given; empty = nothing."""


class PartRefusal(StrEnum):
    """Why a part is not taken."""

    NOT_LEASED = "not_leased"
    """The node does not hold this rollout, or what is kept of its lease had to make room for others."""
    UNEQUAL_LENGTHS = "unequal_lengths"
    GAP = "gap"
    """It begins behind the end of what is there."""
    DIFFERENT = "different"
    """It repeats what is there with other tokens."""
    TOO_LONG = "too_long"
    """An unfinished completion has fewer tokens than a finished one may."""
    BAD_TOKEN = "bad_token"
    """Not of the vocabulary, or a stop token, with which it would have ended."""
    BAD_LOGPROB = "bad_logprob"


@dataclass(slots=True)
class _Partial:
    """One rollout; ids and log-probabilities as little-endian bytes, which grow in place."""

    ids: bytearray
    logprobs: bytearray
    given: tuple[int, ...] | None = ()
    """How long the prefixes are that its node was given, 0 = none: one, or more where its lease was sent again. None:
    not known."""
    origin: _Origin | None = None
    """Of what it was given at first."""
    is_open: bool = True
    """Its node goes on with it."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    def drawers(self, node_id: str, num_tokens: int, *, num_given: int) -> _Drawers:
        """Who drew its first `num_tokens`, if `node_id` goes on behind the first `num_given`."""
        before = self.origin.drawn_by if self.origin is not None and num_given else ()
        own = num_tokens - sum(count for _, count in before)
        if own == 0:
            return before
        if before and before[-1][0] == node_id:
            return (*before[:-1], (node_id, before[-1][1] + own))
        return (*before, (node_id, own))

    def problem(self, rollout: Rollout) -> str:
        """What is wrong with how the finished rollout begins; empty = nothing."""
        if self.given is None:
            return ""
        count = rollout.num_given
        if count not in self.given:
            return f"{count} given tokens instead of {' or '.join(map(str, self.given))}"
        if rollout.completion_ids[:count].astype("<i4").tobytes() != self.ids[: 4 * count]:
            return "other tokens than were given"
        if rollout.behavior_logprobs[:count].astype("<f4").tobytes() != self.logprobs[: 4 * count]:
            return "other log-probabilities than were given"
        return ""


@dataclass(slots=True)
class _Lease:
    node_id: str
    rollouts: dict[int, _Partial]

    @property
    def num_bytes(self) -> int:
        return sum(ROLLOUT_BYTES + 8 * partial.num_tokens for partial in self.rollouts.values())


class Partials:
    """Rollouts in by `begin` or `leased`; out by `finish`, `arrived`, `revoked`, `forget`, or, the longest untouched
    leases first, to keep the budget."""

    def __init__(self, bounds: SamplingBounds, *, budget_bytes: int = BUDGET_BYTES) -> None:
        self._bounds = bounds
        self._stop_ids = np.array(sorted(bounds.stop_ids), np.int32)
        self._budget_bytes = budget_bytes
        self._leases: dict[int, _Lease] = {}
        """The longest untouched first."""
        self.num_bytes = 0
        self.num_let_go = 0
        """Leases that made room for others."""
        self.refused: Counter[PartRefusal] = Counter()
        self.num_gone_on = 0
        """Rollouts that came in finished and that had begun elsewhere, or before their node's restart."""
        self.tokens_saved = 0
        """Tokens that their nodes did not have to draw."""

    def begin(self, lease: SendLease) -> tuple[Prefix, ...]:
        """The lease goes out: what it carries of what was drawn before, the longest first, as far as it has room."""
        earlier = dict(lease.goes_on)
        found = (self.prefix(earlier_id, index) for index, earlier_id in lease.goes_on)
        prefixes: list[Prefix] = []
        room = MAX_PREFIX_TOKENS
        for prefix in sorted((one for one in found if one is not None), key=lambda one: -len(one.ids)):
            if len(prefix.ids) <= room:
                prefixes.append(prefix)
                room -= len(prefix.ids)
        origins = {one.index: self._origin(earlier[one.index], one.index) for one in prefixes}
        again = lease.lease_id in earlier.values()
        self.leased(lease.node_id, lease.lease_id, lease.indices, prefixes, origins=origins, again=again)
        return tuple(prefixes)

    def leased(
        self,
        node_id: str,
        lease_id: int,
        indices: Iterable[int],
        prefixes: Sequence[Prefix] = (),
        *,
        origins: Mapping[int, _Origin] = _NEW,
        again: bool = False,
    ) -> None:
        """A node holds these rollouts from now on, and has been given the prefixes. Told again, what is there stays;
        `again`: what is not there has been told before."""
        given = {prefix.index: prefix for prefix in prefixes}
        known = self._leases.get(lease_id)
        rollouts = known.rollouts if known is not None and known.node_id == node_id else {}
        self._drop(lease_id)
        for index in indices:
            partial = rollouts.setdefault(index, _Partial(bytearray(), bytearray(), None if again else ()))
            partial.is_open = True
            if index in given and not partial.ids:
                partial.ids += given[index].ids.astype("<i4").tobytes()
                partial.logprobs += given[index].logprobs.astype("<f4").tobytes()
                partial.origin = origins.get(index)
            count = len(given[index].ids) if index in given else 0
            if partial.given is not None and count not in partial.given:
                partial.given = (*partial.given, count)
        self._leases[lease_id] = _Lease(node_id, rollouts)
        self.num_bytes += self._leases[lease_id].num_bytes
        self._make_room()

    def take(self, node_id: str, parts: Iterable[RolloutPart]) -> None:
        """Takes what follows, and counts what does not."""
        for part in parts:
            refusal = self._take(node_id, part)
            if refusal is not None:
                self.refused[refusal] += 1
        self._make_room()

    def prefix(self, lease_id: int, index: int) -> Prefix | None:
        """What is there of a rollout; None when that is nothing."""
        lease = self._leases.get(lease_id)
        partial = None if lease is None else lease.rollouts.get(index)
        if partial is None or not partial.ids:
            return None
        ids = np.frombuffer(bytes(partial.ids), "<i4")
        return Prefix(index=index, ids=ids, logprobs=np.frombuffer(bytes(partial.logprobs), "<f4"))

    def finish(self, node_id: str, rollout: Rollout) -> Finished:
        """The node has sent the finished rollout: what to make of it. What was there of it is forgotten, and so is what
        it has gone on with, unless the node that drew that goes on as well and may still be first in the end."""
        lease = self._leases.get(rollout.lease_id)
        partial = None if lease is None or lease.node_id != node_id else lease.rollouts.get(rollout.index)
        num_tokens = len(rollout.completion_ids)
        drawers: _Drawers = ((node_id, num_tokens),)
        problem = "" if partial is None else partial.problem(rollout)
        if partial is not None:
            if partial.given is not None and not problem:
                drawers = partial.drawers(node_id, num_tokens, num_given=rollout.num_given)
                self.num_gone_on += rollout.num_given > 0
                self.tokens_saved += rollout.num_given
            self.arrived(node_id, rollout.lease_id, rollout.index)
            self._forget_origins(partial, rollout.index)
        version = rollout.policy_version_start
        spans = tuple(Span(node_id=who, policy_version=version, num_tokens=count) for who, count in drawers)
        return Finished(spans=spans, problem=problem)

    def arrived(self, node_id: str, lease_id: int, index: int) -> None:
        """The node has sent the finished rollout."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.node_id == node_id:
            self.forget(lease_id, index)

    def given_back(self, node_id: str, lease_id: int, indices: Iterable[int]) -> None:
        """The node does not go on with these rollouts: what is there of them is kept, for who goes on."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.node_id == node_id:
            for index in indices:
                if index in lease.rollouts:
                    lease.rollouts[index].is_open = False

    def revoked(self, lease_id: int) -> None:
        """Nobody wants the lease's rollouts any more."""
        self._drop(lease_id)

    def forget(self, lease_id: int, index: int) -> None:
        """What was there of this rollout is not needed any more."""
        lease = self._leases.get(lease_id)
        if lease is not None and (partial := lease.rollouts.pop(index, None)) is not None:
            self.num_bytes -= ROLLOUT_BYTES + 8 * partial.num_tokens
            if not lease.rollouts:
                del self._leases[lease_id]

    def _origin(self, lease_id: int, index: int) -> _Origin:
        """Of all that is there of a rollout, which is there."""
        lease = self._leases[lease_id]
        partial = lease.rollouts[index]
        return _Origin(lease_id, partial.drawers(lease.node_id, partial.num_tokens, num_given=partial.num_tokens))

    def _forget_origins(self, partial: _Partial, index: int) -> None:
        seen: set[int] = set()
        origin = partial.origin
        while origin is not None and origin.lease_id not in seen:
            seen.add(origin.lease_id)
            lease = self._leases.get(origin.lease_id)
            before = None if lease is None else lease.rollouts.get(index)
            if before is not None and not before.is_open:
                self.forget(origin.lease_id, index)
            origin = None if before is None else before.origin

    def _take(self, node_id: str, part: RolloutPart) -> PartRefusal | None:
        lease = self._leases.get(part.lease_id)
        partial = None if lease is None or lease.node_id != node_id else lease.rollouts.get(part.index)
        if lease is None or partial is None or not partial.is_open:
            return PartRefusal.NOT_LEASED
        refusal = self._judge(part, partial)
        if refusal is not None:
            return refusal
        known = partial.num_tokens - part.start
        partial.ids += part.ids[known:].astype("<i4").tobytes()
        partial.logprobs += part.logprobs[known:].astype("<f4").tobytes()
        self.num_bytes += 8 * max(0, len(part.ids) - known)
        self._leases[part.lease_id] = self._leases.pop(part.lease_id)
        return None

    def _judge(self, part: RolloutPart, partial: _Partial) -> PartRefusal | None:
        ids, bounds = part.ids, self._bounds
        known = partial.ids[4 * part.start : 4 * (part.start + len(ids))]
        checks = {
            PartRefusal.UNEQUAL_LENGTHS: len(part.logprobs) != len(ids),
            PartRefusal.TOO_LONG: part.start + len(ids) >= bounds.max_tokens,
            PartRefusal.GAP: part.start > partial.num_tokens,
            PartRefusal.DIFFERENT: known != ids.astype("<i4").tobytes()[: len(known)],
            PartRefusal.BAD_TOKEN: bool(
                ((ids < 0) | (ids >= bounds.vocabulary_size) | np.isin(ids, self._stop_ids)).any()
            ),
            PartRefusal.BAD_LOGPROB: bool((part.logprobs > LOGPROB_SLACK).any()),
        }
        return next((reason for reason, holds in checks.items() if holds), None)

    def _make_room(self) -> None:
        while self.num_bytes > self._budget_bytes:
            self._drop(next(iter(self._leases)))
            self.num_let_go += 1

    def _drop(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.num_bytes -= lease.num_bytes


def partials_of(bounds: SamplingBounds, rollouts: Iterable[RolloutRow]) -> Partials:
    """For a hub that starts: `rollouts` are unfinished in its store; nodes that hold some will send what they drew."""
    partials = Partials(bounds)
    leases: dict[tuple[str, int], list[int]] = {}
    for row in rollouts:
        if row.state is ReceiptState.LEASED:
            leases.setdefault((row.node_id, row.lease_id), []).append(row.index)
    for (node_id, lease_id), indices in leases.items():
        partials.leased(node_id, lease_id, indices, again=True)
    return partials
