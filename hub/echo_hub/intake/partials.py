"""What nodes have drawn of rollouts that are not finished, in memory, so that another node can go on with them.

    node a: lease 7, index 0:  [5 9 2] [8 8] ... gone        node b: lease 9, index 0, prefix [5 9 2 8 8]: [4] [1] ...

Told of leases, their ends and every part, in the order of their happening. A part is taken when it goes on where the
last one ended; what it repeats must be as it was. Any other is refused and counted by reason: it costs its own node a
prefix, and nobody a connection. What is kept is a claim, as a rollout is: whether it was drawn honestly is checked on
the finished one. It is lost when the hub ends, and sent again by the nodes when it is back.

Who goes on sends the whole completion, and does not answer for what it was given: that must come back as it was, and
the finished rollout says who drew how much of it. Of a lease from before the hub's start, what was given is not known.
Where no other node held the rollout before, all of it counts as its own node's. Else, and where a lease is not kept any
more, nobody can say who drew its beginning: nobody goes on with it, and finished with anything that was given it is
drawn anew, for its node must not answer for what another may have forged.

Every token comes with the version that drew it. What a node draws itself is by its lease's version; where the run
interrupts completions (training.on_new_version), by that or newer ones that are published, which rise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

from echo_hub.core.effects import SendLease
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.snapshot import RolloutRow
from echo_hub.scoring.checks import LOGPROB_SLACK, SamplingBounds
from echo_shared.messages import (
    MAX_PREFIX_TOKENS,
    MAX_VERSION_SPANS,
    LeasedPrefix,
    ReceiptState,
    Rollout,
    RolloutPart,
    rollout_id,
)
from echo_shared.rollout_books import DrawnSpan
from echo_shared.version_spans import Spans, between, grown, num_tokens, problem

BUDGET_BYTES: Final = 128 * 2**20
"""Sixteen million tokens."""
ROLLOUT_BYTES: Final = 512
"""What a rollout takes besides its tokens, its share of its lease included."""
SPAN_BYTES: Final = 256
"""What each further version takes that it was drawn by."""

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

    spans: tuple[DrawnSpan, ...] = ()
    """Who drew how much of it by which version; empty = the node that it was leased to drew all, by its lease's
    version."""
    problem: str = ""
    """What in it cannot be, or contradicts what its node was given; empty = nothing."""
    is_unattributed: bool = False
    """Nobody knows who drew its beginning."""


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
    BAD_VERSION = "bad_version"
    """Not the lease's, or, where that may be, older than what is there or not published."""


@dataclass(slots=True)
class _Partial:
    """One rollout; ids and log-probabilities as little-endian bytes, which grow in place."""

    ids: bytearray
    logprobs: bytearray
    versions: Spans = ()
    given: tuple[int, ...] | None = ()
    """How long the prefixes are that its node was given, 0 = none: one, or more where its lease was sent again. None:
    not known."""
    origin: _Origin | None = None
    """Of what it was given at first."""
    others_held: bool = False
    """Where it is not known what its node was given: another may have drawn that."""
    is_open: bool = True
    """Its node goes on with it."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def num_bytes(self) -> int:
        return ROLLOUT_BYTES + 8 * self.num_tokens + SPAN_BYTES * max(0, len(self.versions) - 1)

    def drawers(self, node_id: str, num_tokens: int, *, num_given: int) -> _Drawers:
        """Who drew its first `num_tokens`, if `node_id` goes on behind the first `num_given`."""
        before = self.origin.drawn_by if self.origin is not None and num_given else ()
        own = num_tokens - sum(count for _, count in before)
        if own == 0:
            return before
        if before and before[-1][0] == node_id:
            return (*before[:-1], (node_id, before[-1][1] + own))
        return (*before, (node_id, own))

    def problem(self, rollout: Rollout, versions: Spans, oldest: int) -> str:
        """What is wrong with how the finished rollout begins; empty = nothing. `oldest`: that may have drawn what its
        node was not given."""
        if self.given is None:
            return ""
        count = rollout.num_given
        if count not in self.given:
            return f"{count} given tokens instead of {' or '.join(map(str, self.given))}"
        if (count or self.ids) and (wrong := self._beginning_problem(rollout, versions)):
            return wrong
        own = between(versions, count, len(rollout.completion_ids))
        if own and own[0].policy_version < oldest:
            return f"drawn by version {own[0].policy_version}, leased by {oldest}"
        return ""

    def _beginning_problem(self, rollout: Rollout, versions: Spans) -> str:
        """Of what its node was given, and has sent of it before."""
        count = rollout.num_given
        if rollout.completion_ids[:count].astype("<i4").tobytes() != self.ids[: 4 * count]:
            return "other tokens than were given"
        if rollout.behavior_logprobs[:count].astype("<f4").tobytes() != self.logprobs[: 4 * count]:
            return "other log-probabilities than were given"
        if between(versions, 0, count) != between(self.versions, 0, count):
            return "other versions than were given"
        if rollout.completion_ids[: self.num_tokens].astype("<i4").tobytes() != self.ids:
            return "other tokens than were streamed"
        if rollout.behavior_logprobs[: self.num_tokens].astype("<f4").tobytes() != self.logprobs:
            return "other log-probabilities than were streamed"
        return ""


@dataclass(slots=True)
class _Lease:
    node_id: str
    policy_version: int
    may_move_on: bool
    """To newer versions."""
    rollouts: dict[int, _Partial]

    @property
    def num_bytes(self) -> int:
        return sum(partial.num_bytes for partial in self.rollouts.values())


class Partials:
    """Rollouts in by `begin` or `leased`; out by `finish`, `arrived`, `revoked`, `forget`, or, the longest untouched
    leases first, to keep the budget."""

    def __init__(
        self,
        bounds: SamplingBounds,
        *,
        published_version: int = 0,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._bounds = bounds
        self.published_version = published_version
        """The newest that nodes were told of."""
        self._first_known = published_version
        self._announced: set[int] = set()
        """Versions that nodes were told of since the hub's start; those up to `_first_known` may be from before."""
        self._goes_on = np.ones(bounds.vocabulary_size, np.bool_)
        """Of each token, whether a completion may go on behind it."""
        self._goes_on[[stop for stop in bounds.stop_ids if stop < bounds.vocabulary_size]] = False
        self._budget_bytes = budget_bytes
        self._leases: dict[int, _Lease] = {}
        """The longest untouched first."""
        self.num_bytes = 0
        self.refused: Counter[PartRefusal] = Counter()
        self.num_gone_on = 0
        """Rollouts that came in finished and that had begun elsewhere, or before their node's restart."""
        self.tokens_saved = 0
        """Tokens that their nodes did not have to draw."""

    def begin(self, lease: SendLease) -> tuple[LeasedPrefix, ...]:
        """The lease goes out: what it carries of what was drawn before, the longest first, as far as it has room."""
        earlier = dict(lease.goes_on)
        found = (self.prefix(earlier_id, index) for index, earlier_id in lease.goes_on)
        prefixes: list[LeasedPrefix] = []
        room = MAX_PREFIX_TOKENS
        for prefix in sorted((one for one in found if one is not None), key=lambda one: -len(one.ids)):
            if len(prefix.ids) <= room:
                prefixes.append(prefix)
                room -= len(prefix.ids)
        origins = {one.index: self._origin(earlier[one.index], one.index) for one in prefixes}
        again = lease.lease_id in earlier.values()
        self.leased(
            lease.node_id,
            lease.lease_id,
            lease.indices,
            prefixes,
            policy_version=lease.policy_version,
            may_move_on=lease.may_move_on,
            origins=origins,
            again=again,
        )
        return tuple(prefixes)

    def leased(
        self,
        node_id: str,
        lease_id: int,
        indices: Iterable[int],
        prefixes: Sequence[LeasedPrefix] = (),
        *,
        policy_version: int,
        may_move_on: bool = False,
        origins: Mapping[int, _Origin] = _NEW,
        again: bool = False,
        others_held: Collection[int] = (),
    ) -> None:
        """A node holds these rollouts from now on, and has been given the prefixes. Told again, what is there stays;
        `again`: what is not there has been told before, and of `others_held` other nodes had leases then."""
        given = {prefix.index: prefix for prefix in prefixes}
        known = self._leases.get(lease_id)
        rollouts = known.rollouts if known is not None and known.node_id == node_id else {}
        self._drop(lease_id)
        for index in indices:
            new = _Partial(
                bytearray(), bytearray(), given=None if again else (), others_held=again and index in others_held
            )
            partial = rollouts.setdefault(index, new)
            partial.is_open = True
            if index in given and not partial.ids:
                partial.ids += given[index].ids.astype("<i4").tobytes()
                partial.logprobs += given[index].logprobs.astype("<f4").tobytes()
                partial.versions = given[index].versions or grown((), policy_version, len(given[index].ids))
                partial.origin = origins.get(index)
            count = len(given[index].ids) if index in given else 0
            if partial.given is not None and count not in partial.given:
                partial.given = (*partial.given, count)
        self._leases[lease_id] = _Lease(node_id, policy_version, may_move_on, rollouts)
        self.num_bytes += self._leases[lease_id].num_bytes
        self._make_room()

    def announced(self, policy_version: int) -> None:
        """Nodes are told of this version, the newest one."""
        self.published_version = policy_version
        self._announced.add(policy_version)

    def take(self, node_id: str, parts: Iterable[RolloutPart]) -> tuple[str, ...]:
        """Take what follows, and count what does not. Return the rollouts of which these are the first tokens."""
        begun: list[str] = []
        for part in parts:
            before = self._num_tokens(part.lease_id, part.index)
            refusal = self._take(node_id, part)
            if refusal is not None:
                self.refused[refusal] += 1
            elif not before and self._num_tokens(part.lease_id, part.index):
                begun.append(rollout_id(part.lease_id, part.index))
        self._make_room()
        return tuple(begun)

    def _num_tokens(self, lease_id: int, index: int) -> int:
        """Of an unfinished rollout, that are here."""
        lease = self._leases.get(lease_id)
        partial = None if lease is None else lease.rollouts.get(index)
        return 0 if partial is None else partial.num_tokens

    def prefix(self, lease_id: int, index: int) -> LeasedPrefix | None:
        """What is there of a rollout; None when that is nothing, or nobody knows whose."""
        lease = self._leases.get(lease_id)
        partial = None if lease is None else lease.rollouts.get(index)
        if partial is None or not partial.ids or partial.others_held:
            return None
        ids = np.frombuffer(bytes(partial.ids), "<i4")
        logprobs = np.frombuffer(bytes(partial.logprobs), "<f4")
        return LeasedPrefix(index=index, ids=ids, logprobs=logprobs, versions=partial.versions)

    def finish(self, node_id: str, rollout: Rollout) -> Finished:
        """The node has sent the finished rollout: what to make of it. What was there of it is forgotten, and so is what
        it has gone on with, unless the node that drew that goes on as well and may still be first in the end."""
        lease = self._leases.get(rollout.lease_id)
        partial = None if lease is None or lease.node_id != node_id else lease.rollouts.get(rollout.index)
        count = len(rollout.completion_ids)
        versions = rollout.versions or grown((), rollout.policy_version_start, count)
        drawers: _Drawers = ((node_id, count),)
        wrong = self._length_problem(count) or _version_problem(rollout, versions)
        if lease is not None and partial is not None:
            wrong = wrong or partial.problem(rollout, versions, lease.policy_version)
            wrong = wrong or self._unpublished(versions, lease)
            if partial.given is not None and not wrong:
                drawers = partial.drawers(node_id, count, num_given=rollout.num_given)
                self.num_gone_on += rollout.num_given > 0
                self.tokens_saved += rollout.num_given
            self.arrived(node_id, rollout.lease_id, rollout.index)
            self._forget_origins(partial, rollout.index)
        if wrong:
            return Finished(problem=wrong)
        if rollout.num_given and (partial is None or partial.others_held):
            return Finished(is_unattributed=True)
        spans = tuple(_spans(drawers, versions))
        as_leased = lease is not None and partial is not None and _are(spans, node_id, lease.policy_version)
        return Finished(spans=() if as_leased else spans)

    def _length_problem(self, count: int) -> str:
        """What is as long as no completion can be is seen before its length counts in anybody's pace."""
        most = self._bounds.max_tokens
        return "" if 1 <= count <= most else f"{count} tokens, of 1 to {most} that a completion has"

    def _unpublished(self, versions: Spans, lease: _Lease) -> str:
        """A version among these that no node can have; empty = there is none."""
        unknown = [span.policy_version for span in versions if not self._may_have(span.policy_version, lease)]
        return f"version {unknown[0]}, which is not published" if unknown else ""

    def _may_have(self, version: int, lease: _Lease) -> bool:
        """Whether the lease's node may have this version: an evaluation's lease may name one that nobody is told of."""
        return version <= max(self._first_known, lease.policy_version) or version in self._announced

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
            self.num_bytes -= partial.num_bytes
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
        refusal = self._judge(part, partial, lease)
        if refusal is not None:
            return refusal
        known, before = partial.num_tokens - part.start, partial.num_bytes
        partial.ids += part.ids[known:].astype("<i4").tobytes()
        partial.logprobs += part.logprobs[known:].astype("<f4").tobytes()
        partial.versions = grown(partial.versions, part.policy_version, max(0, len(part.ids) - known))
        self.num_bytes += partial.num_bytes - before
        self._leases[part.lease_id] = self._leases.pop(part.lease_id)
        return None

    def _judge(self, part: RolloutPart, partial: _Partial, lease: _Lease) -> PartRefusal | None:
        ids, stop = part.ids, part.start + len(part.ids)
        if len(part.logprobs) != len(ids):
            return PartRefusal.UNEQUAL_LENGTHS
        if stop >= self._bounds.max_tokens:
            return PartRefusal.TOO_LONG
        if part.start > partial.num_tokens:
            return PartRefusal.GAP
        known = partial.ids[4 * part.start : 4 * stop]
        known_by = between(partial.versions, part.start, stop) if known else ()
        if known and (
            known != ids.astype("<i4").tobytes()[: len(known)]
            or known_by != grown((), part.policy_version, num_tokens(known_by))
        ):
            return PartRefusal.DIFFERENT
        if not len(ids):
            return None
        if ids.min() < 0 or ids.max() >= len(self._goes_on) or not self._goes_on[ids].all():
            return PartRefusal.BAD_TOKEN
        if part.logprobs.max() > LOGPROB_SLACK:
            return PartRefusal.BAD_LOGPROB
        if num_tokens(known_by) < len(ids) and not self._may_draw(part.policy_version, partial, lease):
            return PartRefusal.BAD_VERSION
        return None

    def _may_draw(self, version: int, partial: _Partial, lease: _Lease) -> bool:
        """Whether the node may have drawn more of it by this version."""
        there = partial.versions[-1].policy_version if partial.versions else 0
        # What was given to a lease that is not known any more comes first, and is older than the lease.
        oldest = 0 if partial.given is None and lease.may_move_on else lease.policy_version
        newest = self.published_version if lease.may_move_on else lease.policy_version
        has_room = version == there or len(partial.versions) < MAX_VERSION_SPANS
        in_order = max(there, oldest) <= version <= max(newest, lease.policy_version)
        return in_order and has_room and self._may_have(version, lease)

    def _make_room(self) -> None:
        while self.num_bytes > self._budget_bytes:
            self._drop(next(iter(self._leases)))

    def _drop(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.num_bytes -= lease.num_bytes


def _version_problem(rollout: Rollout, versions: Spans) -> str:
    """What in the versions that a node tells of a finished rollout cannot be; empty = nothing."""
    ends = (rollout.policy_version_start, rollout.policy_version_end)
    if not rollout.versions:
        return f"versions {ends[0]} to {ends[1]}, and not which tokens are whose" if ends[0] != ends[1] else ""
    if wrong := problem(versions, len(rollout.completion_ids)):
        return wrong
    told = (versions[0].policy_version, versions[-1].policy_version)
    return f"tokens by versions {told[0]} to {told[1]}, said to be {ends[0]} to {ends[1]}" if told != ends else ""


def _spans(drawers: _Drawers, versions: Spans) -> Iterator[DrawnSpan]:
    """Who drew how much by which version, in order."""
    begin = 0
    for node_id, count in drawers:
        for span in between(versions, begin, begin + count):
            yield DrawnSpan(node_id=node_id, policy_version=span.policy_version, num_tokens=span.num_tokens)
        begin += count


def _are(spans: Sequence[DrawnSpan], node_id: str, policy_version: int) -> bool:
    """Whether this node drew it all by this version."""
    return all((span.node_id, span.policy_version) == (node_id, policy_version) for span in spans)


def partials_of(
    bounds: SamplingBounds, rollouts: Iterable[RolloutRow], *, interrupts: bool = False, published_version: int = 0
) -> Partials:
    """For a hub that starts: `rollouts` are unfinished in its store; nodes that hold some will send what they drew.
    `interrupts`: nodes may have gone on by newer versions in mid-completion."""
    partials = Partials(bounds, published_version=published_version)
    leases: dict[int, list[RolloutRow]] = {}
    for row in rollouts:
        if row.state is ReceiptState.LEASED:
            leases.setdefault(row.lease_id, []).append(row)
    for lease_id, rows in leases.items():
        first = rows[0]
        partials.leased(
            first.node_id,
            lease_id,
            [row.index for row in rows],
            policy_version=first.policy_version,
            may_move_on=interrupts and EvaluationGroup.of(first.group_id) is None,
            again=True,
            others_held=[row.index for row in rows if row.others_held],
        )
    return partials
