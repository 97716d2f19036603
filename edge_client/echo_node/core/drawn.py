"""Tokens of unfinished rollouts, with the number of tokens that were sent to the hub on this connection.

A rollout starts with its lease's prefix, which the hub already has, and grows with the engine's reports. The tokens
stay until the rollout is finished or given up, so that a new engine or a newer version continues from them. A
reconnected node sends all tokens again: the hub may have lost some. On each connection every token is sent once, in
order, in messages within the protocol's limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_shared.sampling.interface import DrawnPart, FinishedRollout, Prefix
from echo_shared.sampling.version_spans import Spans, between, grown
from echo_shared.wire.messages import (
    MAX_GROUP_SIZE,
    MAX_PARTS_TOKENS,
    Lease,
    LeasedPrefix,
    Rollout,
    RolloutPart,
    RolloutParts,
    rollout_id,
)


@dataclass(slots=True, kw_only=True)
class _Progress:
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: Spans
    num_given: int
    num_sent: int
    sampling_s: float = 0.0
    """Seconds of sampling since the engine last started this rollout, as the engine reported. `earlier_s` is the time
    before that start.
    """
    earlier_s: float = 0.0

    @classmethod
    def behind(cls, given: LeasedPrefix, lease: Lease) -> _Progress:
        """Return the progress of a rollout that starts with its lease's prefix."""
        count = len(given.ids)
        versions = given.versions or grown((), lease.policy_version, count)
        return cls(ids=given.ids, logprobs=given.logprobs, versions=versions, num_given=count, num_sent=count)

    @classmethod
    def fresh(cls) -> _Progress:
        return cls(ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=(), num_given=0, num_sent=0)


class DrawnByLease:
    """Progress of rollouts by lease and index. `begin` adds rollouts; `end` and `forget` remove them."""

    def __init__(self) -> None:
        self._leases: dict[int, dict[int, _Progress]] = {}
        self.num_tokens = 0
        """Tokens drawn by this node, including those of dropped rollouts."""
        self.num_finished = 0

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the unfinished rollouts, including their leases' prefixes."""
        return sum(len(progress.ids) for rollouts in self._leases.values() for progress in rollouts.values())

    def begin(self, lease: Lease, pending: Set[int]) -> None:
        """Record the rollouts `pending` of a new lease as begun. A rollout whose prefix (tokens drawn before) is in the
        lease continues that prefix."""
        given = {prefix.index: prefix for prefix in lease.prefixes}
        self._leases[lease.lease_id] = {
            index: _Progress.behind(given[index], lease) if index in given else _Progress.fresh() for index in pending
        }

    def add(self, part: DrawnPart) -> None:
        """Append the tokens of an engine's report. Reports of removed rollouts are ignored, and so are reports that
        leave a gap after the known tokens, such as a late report of an old engine.
        """
        progress = self._leases.get(part.lease_id, {}).get(part.index)
        if progress is not None and part.start == len(progress.ids):
            progress.ids = np.concatenate([progress.ids, part.ids])
            progress.logprobs = np.concatenate([progress.logprobs, part.logprobs])
            progress.versions = grown(progress.versions, part.policy_version, len(part.ids))
            progress.sampling_s = part.sampling_s
            self.num_tokens += len(part.ids)

    def prefixes(self, lease_id: int, indices: Iterable[int]) -> tuple[Prefix, ...]:
        """Return the tokens so far of these rollouts as prefixes, for an engine that starts or restarts the lease."""
        known = self._leases.get(lease_id, {})
        rollouts = {index: known[index] for index in indices if index in known}
        for progress in rollouts.values():
            progress.earlier_s, progress.sampling_s = progress.earlier_s + progress.sampling_s, 0.0
        return tuple(
            Prefix(index=index, ids=progress.ids, logprobs=progress.logprobs)
            for index, progress in rollouts.items()
            if len(progress.ids)
        )

    def num_drawn(self, lease_id: int, index: int) -> int:
        """Return the number of a rollout's tokens, including its prefix."""
        progress = self._leases.get(lease_id, {}).get(index)
        return 0 if progress is None else len(progress.ids)

    def versions(self, lease_id: int) -> set[int]:
        """Return all versions that have drawn tokens of the lease's unfinished rollouts, on any node."""
        rollouts = self._leases.get(lease_id, {}).values()
        return {span.policy_version for progress in rollouts for span in progress.versions}

    def connected(self) -> None:
        """Mark all tokens as unsent: each new connection sends all tokens again, because the hub may have lost some."""
        for rollouts in self._leases.values():
            for progress in rollouts.values():
                progress.num_sent = 0

    def take_unsent(self) -> list[RolloutParts]:
        """Return the unsent tokens as messages, and mark them as sent."""
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

    def end(self, finished: FinishedRollout) -> Rollout:
        """Remove a finished rollout, and return its message for the hub.

        Tokens that no report contained belong to the version that finished the rollout. In the message, `sampling_s` is
        the sum over all engine runs on this node. `num_given` counts only the lease's own prefix, although a restarted
        engine got a longer prefix.
        """
        progress = self._leases.get(finished.lease_id, {}).pop(finished.index, None) or _Progress.fresh()
        count = len(finished.completion_ids)
        told = between(progress.versions, 0, count)
        self.num_tokens += count - min(count, len(progress.ids))
        self.num_finished += 1
        versions = grown(told, finished.policy_version, count - min(count, len(progress.ids)))
        return Rollout(
            rollout_id=rollout_id(finished.lease_id, finished.index),
            lease_id=finished.lease_id,
            group_id=finished.group_id,
            index=finished.index,
            policy_version_start=versions[0].policy_version,
            policy_version_end=versions[-1].policy_version,
            **{**finished.content(), "sampling_s": progress.earlier_s + finished.sampling_s},
            num_given=progress.num_given,
            versions=versions if len(versions) > 1 else (),
        )

    def forget(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)


def _next_part(lease_id: int, index: int, progress: _Progress, room: int) -> RolloutPart:
    """Return the next unsent tokens that one version drew, at most `room` tokens."""
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
