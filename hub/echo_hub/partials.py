"""What nodes have drawn of rollouts that are not finished, in memory, so that another node can go on with them.

    node a: lease 7, index 0:  [5 9 2] [8 8] ... gone        node b: lease 9, index 0, prefix [5 9 2 8 8]: [4] [1] ...

Told of leases, their ends and every part, in the order of their happening. A part is taken when it goes on where the
last one ended; what it repeats must be as it was. Any other is refused and counted by reason: it costs its own node a
prefix, and nobody a connection. What is kept is a claim, as a rollout is: whether it was drawn honestly is checked on
the finished one. It is lost when the hub ends, and sent again by the nodes when it is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from echo_hub.core.snapshot import RolloutRow
from echo_hub.scoring.checks import LOGPROB_SLACK, SamplingBounds
from echo_shared.messages import ReceiptState, RolloutPart
from echo_shared.sampling import Prefix

BUDGET_BYTES: Final = 128 * 2**20
"""Sixteen million tokens."""
ROLLOUT_BYTES: Final = 512
"""What a rollout takes besides its tokens, its share of its lease included."""


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
    is_open: bool = True
    """Its node goes on with it."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


@dataclass(slots=True)
class _Lease:
    node_id: str
    rollouts: dict[int, _Partial]

    @property
    def num_bytes(self) -> int:
        return sum(ROLLOUT_BYTES + 8 * partial.num_tokens for partial in self.rollouts.values())


class Partials:
    """Rollouts in by `leased`; out by `arrived`, `revoked`, `forget`, or, the longest untouched leases first, to keep
    the budget."""

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

    def leased(self, node_id: str, lease_id: int, indices: Iterable[int], prefixes: Sequence[Prefix] = ()) -> None:
        """A node holds these rollouts from now on, and has been given the prefixes. Told again, what is there stays."""
        given = {prefix.index: prefix for prefix in prefixes}
        known = self._leases.get(lease_id)
        before = known.rollouts if known is not None and known.node_id == node_id else {}
        self._drop(lease_id)
        rollouts = {index: before.get(index, _Partial(bytearray(), bytearray())) for index in indices}
        for index, partial in rollouts.items():
            partial.is_open = True
            if index in given and not partial.ids:
                partial.ids += given[index].ids.astype("<i4").tobytes()
                partial.logprobs += given[index].logprobs.astype("<f4").tobytes()
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
        partials.leased(node_id, lease_id, indices)
    return partials
