"""What the rollouts in progress have drawn, and how much of it the hub was sent on this connection.

A rollout begins with what its lease gave as a prefix, which the hub need not be sent, and grows by what the engine
tells. It is kept until it is finished or let go: the engine that follows one that has ended, or the version that
follows another, goes on from there, and a hub that is connected with anew, which may have lost it, is sent all of it
from token 0. With each token goes the version that drew it.

Every token is sent once a connection, in order, in messages within the wire's bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_shared.messages import (
    MAX_GROUP_SIZE,
    MAX_PARTS_TOKENS,
    Lease,
    LeasedPrefix,
    Rollout,
    RolloutPart,
    RolloutParts,
    rollout_id,
)
from echo_shared.sampling import DrawnPart, FinishedRollout, Prefix
from echo_shared.version_spans import Spans, between, grown


@dataclass(slots=True, kw_only=True)
class _Progress:
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: Spans
    num_given: int
    num_sent: int
    sampling_s: float = 0.0
    """Since the engine began it last, as far as it has told; and what the engine took before it was begun anew."""
    earlier_s: float = 0.0

    @classmethod
    def behind(cls, given: LeasedPrefix, lease: Lease) -> _Progress:
        """A rollout that goes on with what its lease has given."""
        count = len(given.ids)
        versions = given.versions or grown((), lease.policy_version, count)
        return cls(ids=given.ids, logprobs=given.logprobs, versions=versions, num_given=count, num_sent=count)

    @classmethod
    def fresh(cls) -> _Progress:
        return cls(ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=(), num_given=0, num_sent=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What is known of a finished rollout beside its tokens."""

    num_given: int
    """By its lease. The engine may have been given more, by the one before it."""
    versions: Spans
    sampling_s: float
    """Of all engines and versions that this node has drawn it with."""


class Drawn:
    """Rollouts by lease and index: in by `begin`, out by `end` or `forget`."""

    def __init__(self) -> None:
        self._leases: dict[int, dict[int, _Progress]] = {}
        self.num_tokens = 0
        """That this node has drawn, of whatever became of them."""
        self.num_finished = 0

    @property
    def num_held_tokens(self) -> int:
        """Of the rollouts in progress, what their leases gave included."""
        return sum(len(progress.ids) for rollouts in self._leases.values() for progress in rollouts.values())

    def begin(self, lease: Lease, pending: Set[int]) -> None:
        """Notes what a new lease, of which the indices `pending` are sampled, has given."""
        given = {prefix.index: prefix for prefix in lease.prefixes}
        self._leases[lease.lease_id] = {
            index: _Progress.behind(given[index], lease) if index in given else _Progress.fresh() for index in pending
        }

    def add(self, part: DrawnPart) -> None:
        """Notes what the engine tells. A rollout that is not held any more, or a part that does not follow, as of an
        engine that has ended, is nothing to keep."""
        progress = self._leases.get(part.lease_id, {}).get(part.index)
        if progress is not None and part.start == len(progress.ids):
            progress.ids = np.concatenate([progress.ids, part.ids])
            progress.logprobs = np.concatenate([progress.logprobs, part.logprobs])
            progress.versions = grown(progress.versions, part.policy_version, len(part.ids))
            progress.sampling_s = part.sampling_s
            self.num_tokens += len(part.ids)

    def prefixes(self, lease_id: int, indices: Iterable[int]) -> tuple[Prefix, ...]:
        """What an engine is to go on from, that now begins the lease, for the first time or anew."""
        rollouts = self._leases.get(lease_id, {})
        for progress in rollouts.values():
            progress.earlier_s, progress.sampling_s = progress.earlier_s + progress.sampling_s, 0.0
        return tuple(
            Prefix(index=index, ids=rollouts[index].ids, logprobs=rollouts[index].logprobs)
            for index in indices
            if index in rollouts and len(rollouts[index].ids)
        )

    def num_drawn(self, lease_id: int, index: int) -> int:
        """Tokens that there are of a rollout."""
        progress = self._leases.get(lease_id, {}).get(index)
        return 0 if progress is None else len(progress.ids)

    def versions(self, lease_id: int) -> set[int]:
        """All versions that this node or another has drawn the lease's rollouts with so far."""
        rollouts = self._leases.get(lease_id, {}).values()
        return {span.policy_version for progress in rollouts for span in progress.versions}

    def connected(self) -> None:
        """The hub has been sent nothing yet."""
        for rollouts in self._leases.values():
            for progress in rollouts.values():
                progress.num_sent = 0

    def take_unsent(self) -> list[RolloutParts]:
        """What the hub was not sent on this connection; it is from here on."""
        messages: list[RolloutParts] = []
        parts: list[RolloutPart] = []
        room = MAX_PARTS_TOKENS
        for lease_id, rollouts in self._leases.items():
            for index, progress in rollouts.items():
                while progress.num_sent < len(progress.ids):
                    parts.append(_next_part(lease_id, index, progress, room))
                    room -= len(parts[-1].ids)
                    if room == 0 or len(parts) == MAX_GROUP_SIZE:
                        messages.append(RolloutParts(parts=tuple(parts)))
                        parts, room = [], MAX_PARTS_TOKENS
        return [*messages, RolloutParts(parts=tuple(parts))] if parts else messages

    def end(self, finished: FinishedRollout) -> Ended:
        """Forgets a finished rollout. What was not told of it before is by the version that the engine has drawn it to
        its end with."""
        progress = self._leases.get(finished.lease_id, {}).pop(finished.index, None) or _Progress.fresh()
        count = len(finished.completion_ids)
        told = between(progress.versions, 0, count)
        self.num_tokens += count - min(count, len(progress.ids))
        self.num_finished += 1
        return Ended(
            num_given=progress.num_given,
            versions=grown(told, finished.policy_version, count - min(count, len(progress.ids))),
            sampling_s=progress.earlier_s + finished.sampling_s,
        )

    def forget(self, lease_id: int) -> None:
        """The lease is not held any more."""
        self._leases.pop(lease_id, None)


def as_rollout(finished: FinishedRollout, ended: Ended) -> Rollout:
    """What the hub is sent of it."""
    versions = ended.versions
    return Rollout(
        rollout_id=rollout_id(finished.lease_id, finished.index),
        lease_id=finished.lease_id,
        group_id=finished.group_id,
        index=finished.index,
        policy_version_start=versions[0].policy_version,
        policy_version_end=versions[-1].policy_version,
        completion_ids=finished.completion_ids,
        behavior_logprobs=finished.behavior_logprobs,
        finish_reason=finished.finish_reason,
        sampling_s=ended.sampling_s,
        num_given=ended.num_given,
        versions=versions if len(versions) > 1 else (),
    )


def _next_part(lease_id: int, index: int, progress: _Progress, room: int) -> RolloutPart:
    """As many tokens as there is room for, of one version."""
    start = progress.num_sent
    span = between(progress.versions, start, len(progress.ids))[0]
    progress.num_sent = start + min(room, span.num_tokens)
    new = slice(start, progress.num_sent)
    return RolloutPart(
        lease_id=lease_id,
        index=index,
        start=start,
        policy_version=span.policy_version,
        ids=progress.ids[new],
        logprobs=progress.logprobs[new],
    )
