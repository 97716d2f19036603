"""Tokens of unfinished rollouts, in memory, so that another node can resume them.

    node a: lease 7, index 0:  [5 9 2] [8 8] ... gone        node b: lease 9, index 0, prefix [5 9 2 8 8]: [4] [1] ...

`Partials` is told of leases, their ends and every part, in order. A part is accepted if it continues the tokens known
so far, or repeats them unchanged. Other parts are refused and counted by reason: the rollout is then missing these
tokens, and the node keeps its connection. Parts are claims, like rollouts; the finished rollout is checked for honest
draws. All parts are lost when the hub ends. Nodes send them again when the hub is back.

A node that resumes a rollout sends the whole completion. It is not responsible for the given prefix, which must come
back unchanged; the finished rollout lists the nodes that drew its parts. For leases from before the hub's start, the
hub does not know the given prefix. If a single node held such a rollout, all tokens count as that node's. If several
nodes held it, or if the hub dropped its lease to save memory, its first tokens are unattributed. Unattributed rollouts
are never resumed. Finished unattributed rollouts with a given prefix are drawn again: a node must not be blamed for
another node's forgery.

Every token has a policy version. A node draws its own tokens with its lease's version. If the run interrupts
completions (training.on_new_version), it may also use newer published versions, in ascending order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

from echo_hub.core.accounting.effects import SendLease
from echo_hub.core.accounting.snapshot import UnfinishedRollout
from echo_hub.core.answer_groups import StreamedTokens, is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.intake.partial_rollout import Drawers, Origin, PartialRollout
from echo_hub.scoring.asked import GroupBounds
from echo_hub.scoring.checks import LOGPROB_SLACK, SamplingBounds, stop_table
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling.version_spans import Spans, between, grown, num_tokens, problem
from echo_shared.wire.messages import (
    MAX_PREFIX_TOKENS,
    MAX_VERSION_SPANS,
    LeasedPrefix,
    ReceiptState,
    Rollout,
    RolloutPart,
    rollout_id,
)

BUDGET_BYTES: Final = 128 * 2**20
"""Memory for all unfinished rollouts, in bytes: sixteen million tokens."""
_NEW: Final[Mapping[int, Origin]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPartial:
    """What the hub knows of a finished rollout, in addition to what its node said."""

    spans: tuple[DrawnSpan, ...] = ()
    """Node and policy version of each part; empty if the leased node drew all tokens with the lease's version."""
    problem: str = ""
    """Contradiction within the rollout, or between rollout and given prefix; empty if none was found."""
    is_unattributed: bool = False
    """True if the hub does not know which node drew the first tokens."""


class PartRefusal(StrEnum):
    """Reason why the hub refuses a part, that is a node's new tokens of an unfinished rollout."""

    NOT_LEASED = "not_leased"
    """The node does not hold this rollout, or the hub dropped its lease to keep the memory budget."""
    UNEQUAL_LENGTHS = "unequal_lengths"
    GAP = "gap"
    """The part begins after the end of the tokens known so far."""
    DIFFERENT = "different"
    """The part repeats tokens with changes."""
    TOO_LONG = "too_long"
    """The tokens reach max_tokens. Only finished completions reach this length, and nodes send those as rollouts."""
    BAD_TOKEN = "bad_token"
    """A token is outside the vocabulary, or is a stop token, which only ends a completion."""
    BAD_LOGPROB = "bad_logprob"
    BAD_VERSION = "bad_version"
    """The version is not the lease's. If the run allows newer versions: the version is unpublished or out of order."""


@dataclass(slots=True)
class _Lease:
    node_id: str
    group_id: int
    bounds: SamplingBounds
    policy_version: int
    may_move_on: bool
    """True if the node may use newer versions for later tokens."""
    rollouts: dict[int, PartialRollout]

    @property
    def num_bytes(self) -> int:
        return sum(partial.num_bytes for partial in self.rollouts.values())


class Partials:
    """Unfinished rollouts of all leases. `begin` and `leased` add rollouts; `finish`, `arrived`, `revoked` and `forget`
    remove them. Above the memory budget, the leases that changed least recently are dropped."""

    def __init__(
        self,
        bounds: GroupBounds,
        *,
        published_version: int = 0,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._bounds = bounds
        self.published_version = published_version
        """Newest announced version."""
        self._first_known = published_version
        self._announced: set[int] = set()
        """Versions announced since the hub's start. A version up to `_first_known` may have been announced before."""
        self._budget_bytes = budget_bytes
        self._leases: dict[int, _Lease] = {}
        """Leases by id, least recently changed first."""
        self.num_bytes = 0
        self.refused: Counter[PartRefusal] = Counter()
        self.num_gone_on = 0
        """Number of finished rollouts that continued a prefix. The prefix came from another node, or from the same node
        before that node restarted.
        """
        self.tokens_saved = 0
        """Number of tokens in the prefixes that resumed rollouts were given."""

    def begin(self, lease: SendLease) -> tuple[LeasedPrefix, ...]:
        """Add the rollouts of a new lease. Return the prefixes to send with it: the longest first, as many as the
        message's token limit allows."""
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
            group_id=lease.group_id,
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
        group_id: int = 0,
        policy_version: int,
        may_move_on: bool = False,
        origins: Mapping[int, Origin] = _NEW,
        again: bool = False,
        others_held: Collection[int] = (),
    ) -> None:
        """Add the rollouts that a node holds, with the prefixes that it was given. Tokens known for the same lease are
        kept. `again`: the lease was sent before, so rollouts that are missing here get an unknown prefix.
        `others_held`: rollouts whose unknown prefix another node may have drawn."""
        given = {prefix.index: prefix for prefix in prefixes}
        known = self._leases.get(lease_id)
        rollouts = known.rollouts if known is not None and known.node_id == node_id else {}
        self._drop(lease_id)
        for index in indices:
            new = PartialRollout(
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
        bounds = self._bounds.of(group_id)
        self._leases[lease_id] = _Lease(node_id, group_id, bounds, policy_version, may_move_on, rollouts)
        self.num_bytes += self._leases[lease_id].num_bytes
        self._make_room()

    def announced(self, policy_version: int) -> None:
        self.published_version = policy_version
        self._announced.add(policy_version)

    def take(self, node_id: str, parts: Iterable[RolloutPart]) -> tuple[str, ...]:
        """Accept or refuse each part. Return the ids of rollouts whose first tokens arrived."""
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
        lease = self._leases.get(lease_id)
        partial = None if lease is None else lease.rollouts.get(index)
        return 0 if partial is None else partial.num_tokens

    def prefix(self, lease_id: int, index: int) -> LeasedPrefix | None:
        """Return the known tokens of a rollout; None if there are none or they are unattributed."""
        lease = self._leases.get(lease_id)
        partial = None if lease is None else lease.rollouts.get(index)
        if partial is None or not partial.ids or partial.others_held:
            return None
        ids = np.frombuffer(bytes(partial.ids), "<i4")
        logprobs = np.frombuffer(bytes(partial.logprobs), "<f4")
        return LeasedPrefix(index=index, ids=ids, logprobs=logprobs, versions=partial.versions)

    def streamed(self, node_id: str, lease_id: int, index: int) -> tuple[int, PartialRollout] | None:
        """Return the group and the known tokens of a rollout that this node draws; None if it holds no such rollout."""
        lease = self._leases.get(lease_id)
        partial = None if lease is None or lease.node_id != node_id else lease.rollouts.get(index)
        return None if lease is None or partial is None else (lease.group_id, partial)

    def answers_under_way(self) -> Iterator[StreamedTokens]:
        """Yield the known tokens of each unfinished sample of a tenant's request that has any."""
        for lease in [lease for lease in self._leases.values() if is_answer(lease.group_id)]:
            for index, partial in lease.rollouts.items():
                if partial.ids and partial.is_whole:
                    ids = np.frombuffer(bytes(partial.ids), "<i4").astype(np.int32)
                    logprobs = np.frombuffer(bytes(partial.logprobs), "<f4").astype(np.float32)
                    yield StreamedTokens(lease.node_id, lease.group_id, index, ids, logprobs)

    def finish(self, node_id: str, rollout: Rollout) -> FinishedPartial:
        """Return what the hub knows of a finished rollout, and drop its tokens. Also drop the unfinished rollouts that
        it resumed, except those whose nodes still draw and may finish first."""
        lease = self._leases.get(rollout.lease_id)
        partial = None if lease is None or lease.node_id != node_id else lease.rollouts.get(rollout.index)
        count = len(rollout.completion_ids)
        versions = rollout.versions or grown((), rollout.policy_version_start, count)
        drawers: Drawers = ((node_id, count),)
        bounds = self._bounds.of(rollout.group_id) if lease is None else lease.bounds
        wrong = _length_problem(count, bounds) or _version_problem(rollout, versions)
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
            return FinishedPartial(problem=wrong)
        if rollout.num_given and (partial is None or partial.others_held):
            return FinishedPartial(is_unattributed=True)
        spans = tuple(_spans(drawers, versions))
        as_leased = lease is not None and partial is not None and _are(spans, node_id, lease.policy_version)
        return FinishedPartial(spans=() if as_leased else spans)

    def _unpublished(self, versions: Spans, lease: _Lease) -> str:
        """Return an error text for the first version that the node cannot have; "" if it may have all."""
        unknown = [span.policy_version for span in versions if not self._may_have(span.policy_version, lease)]
        return f"version {unknown[0]}, which is not published" if unknown else ""

    def _may_have(self, version: int, lease: _Lease) -> bool:
        """Return True if the lease's node may have this version: a published one, or any up to the lease's own.
        Evaluation leases may name versions that were never announced."""
        return version <= max(self._first_known, lease.policy_version) or version in self._announced

    def arrived(self, node_id: str, lease_id: int, index: int) -> None:
        """Drop the tokens of a rollout that its node has finished, if this node holds the lease."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.node_id == node_id:
            self.forget(lease_id, index)

    def given_back(self, node_id: str, lease_id: int, indices: Iterable[int]) -> None:
        """Keep the tokens of these rollouts for the next node that gets them: their node has given them back."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.node_id == node_id:
            for index in indices:
                if index in lease.rollouts:
                    lease.rollouts[index].is_open = False

    def revoked(self, lease_id: int) -> None:
        self._drop(lease_id)

    def forget(self, lease_id: int, index: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and (partial := lease.rollouts.pop(index, None)) is not None:
            self.num_bytes -= partial.num_bytes
            if not lease.rollouts:
                del self._leases[lease_id]

    def _origin(self, lease_id: int, index: int) -> Origin:
        """Return the origin (lease and nodes) to record for a prefix that consists of all known tokens of this
        rollout.
        """
        lease = self._leases[lease_id]
        partial = lease.rollouts[index]
        return Origin(lease_id, partial.drawers(lease.node_id, partial.num_tokens, num_given=partial.num_tokens))

    def _forget_origins(self, partial: PartialRollout, index: int) -> None:
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

    def _judge(self, part: RolloutPart, partial: PartialRollout, lease: _Lease) -> PartRefusal | None:
        ids, stop = part.ids, part.start + len(part.ids)
        if len(part.logprobs) != len(ids):
            return PartRefusal.UNEQUAL_LENGTHS
        if stop >= lease.bounds.max_tokens:
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
        stops = stop_table(lease.bounds.stop_ids, lease.bounds.vocabulary_size)
        if ids.min() < 0 or ids.max() >= len(stops) or stops[ids].any():
            return PartRefusal.BAD_TOKEN
        if part.logprobs.max() > LOGPROB_SLACK:
            return PartRefusal.BAD_LOGPROB
        if num_tokens(known_by) < len(ids) and not self._may_draw(part.policy_version, partial, lease):
            return PartRefusal.BAD_VERSION
        return None

    def _may_draw(self, version: int, partial: PartialRollout, lease: _Lease) -> bool:
        """Return True if the node may have drawn further tokens with this version."""
        there = partial.versions[-1].policy_version if partial.versions else 0
        # The hub does not know the given prefix: its tokens are older than the lease and may have any older version.
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


def _length_problem(count: int, bounds: SamplingBounds) -> str:
    """Return what is wrong with the completion's length; "" if nothing is. A rollout of an impossible length must not
    count in its node's measured speed."""
    most = bounds.max_tokens
    return "" if 1 <= count <= most else f"{count} tokens, of 1 to {most} that a completion has"


def _version_problem(rollout: Rollout, versions: Spans) -> str:
    ends = (rollout.policy_version_start, rollout.policy_version_end)
    if not rollout.versions:
        return f"versions {ends[0]} to {ends[1]}, and not which tokens are whose" if ends[0] != ends[1] else ""
    if wrong := problem(versions, len(rollout.completion_ids)):
        return wrong
    told = (versions[0].policy_version, versions[-1].policy_version)
    return f"tokens by versions {told[0]} to {told[1]}, said to be {ends[0]} to {ends[1]}" if told != ends else ""


def _spans(drawers: Drawers, versions: Spans) -> Iterator[DrawnSpan]:
    begin = 0
    for node_id, count in drawers:
        for span in between(versions, begin, begin + count):
            yield DrawnSpan(node_id=node_id, policy_version=span.policy_version, num_tokens=span.num_tokens)
        begin += count


def _are(spans: Sequence[DrawnSpan], node_id: str, policy_version: int) -> bool:
    return all((span.node_id, span.policy_version) == (node_id, policy_version) for span in spans)


def partials_of(
    bounds: GroupBounds,
    rollouts: Iterable[UnfinishedRollout],
    *,
    interrupts: bool = False,
    published_version: int = 0,
) -> Partials:
    """Return the unfinished rollouts at a hub's start. `rollouts`: those in the store; the nodes that hold them send
    their tokens again. `interrupts`: nodes may continue rollouts with newer versions."""
    partials = Partials(bounds, published_version=published_version)
    leases: dict[int, list[UnfinishedRollout]] = {}
    for row in rollouts:
        if row.state is ReceiptState.LEASED:
            leases.setdefault(row.lease_id, []).append(row)
    for lease_id, rows in leases.items():
        first = rows[0]
        partials.leased(
            first.node_id,
            lease_id,
            [row.index for row in rows],
            group_id=first.group_id,
            policy_version=first.policy_version,
            may_move_on=interrupts and EvaluationGroup.of(first.group_id) is None and not is_answer(first.group_id),
            again=True,
            others_held=[row.index for row in rows if row.others_held],
        )
    return partials
