"""Interface of all sampling engines: a request for a group's rollouts, and the rollouts, in progress or finished, as
token ids.

Draw t of a completion depends only on (seed, index, t), so an interrupted rollout can resume on another engine: a
request with the tokens drawn so far, a `Prefix`, yields the same completion that the first engine would have drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import BackendError
from echo_shared.wire.messages import Completion

BAD_PREFIX: Final = "bad_prefix"
"""Code of the BackendError for a prefix that cannot be the beginning of an unfinished completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """First tokens of rollout `index`, drawn by an earlier engine."""

    index: int
    ids: NDArray[np.int32]
    """Token ids [T]. The engine's first draw is draw number T."""
    logprobs: NDArray[np.float32]
    """Log-probabilities [T] in nats, as reported by the node that drew the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Request for the rollouts `indices` of one group: one prompt, drawn as `echo_shared.sampling.draws` defines."""

    lease_id: int
    group_id: int
    indices: tuple[int, ...]
    prompt_ids: NDArray[np.int32]
    seed: int
    policy_version: int
    temperature: float
    max_tokens: int
    """Maximum tokens of a completion, including its prefix and stop token."""
    stop_ids: tuple[int, ...]
    prefixes: tuple[Prefix, ...] = ()
    """At most one prefix per index. A rollout without a prefix starts at its first token."""
    returns_routes: bool = False
    """True: the rollouts should have `routes`, if the engine can record them."""
    keep_keys: bool = True
    """True: an engine with a prefix cache should keep the rollouts' keys and values, because a later prompt may begin
    with this prompt and a completion.
    """

    @property
    def fresh(self) -> tuple[int, ...]:
        """Indices of the rollouts without a prefix."""
        if not self.prefixes:
            return self.indices
        begun = {prefix.index for prefix in self.prefixes}
        return tuple(index for index in self.indices if index not in begun)

    def starts(self) -> list[tuple[NDArray[np.int32], tuple[int, ...]]]:
        """Return (token ids to prefill, indices that start from them): the prompt for the rollouts without a prefix,
        then prompt plus prefix for each other rollout.
        """
        alike = [(self.prompt_ids, self.fresh)] if self.fresh else []
        return alike + [(np.concatenate([self.prompt_ids, one.ids]), (one.index,)) for one in self.prefixes]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPart:
    """New tokens of an unfinished rollout. `start` is the position of the first one in the completion."""

    lease_id: int
    index: int
    policy_version: int
    start: int
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-probabilities in nats, one per token."""
    sampling_s: float = 0.0
    """Seconds from the start of the prompt's prefill to the newest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout(Completion):
    """One completion as an engine reports it."""

    lease_id: int
    group_id: int
    index: int
    policy_version: int
    num_given: int = 0
    """Number of first tokens that came from the request's prefix."""


def check_prefixes(request: GroupRequest, *, vocab_size: int) -> None:
    """Raise BackendError for a prefix that cannot be the beginning of an unfinished completion of this request."""
    seen: set[int] = set()
    for prefix in request.prefixes:
        count, problem = len(prefix.ids), None
        if prefix.index not in request.indices or prefix.index in seen:
            problem = "its index is not in the request, or has two prefixes"
        elif count == 0 or len(prefix.logprobs) != count:
            problem = f"{count} tokens and {len(prefix.logprobs)} log-probabilities"
        elif count >= request.max_tokens:
            problem = f"it is already complete: {count} tokens of {request.max_tokens}"
        elif np.isin(prefix.ids, request.stop_ids).any():
            problem = "it is already complete: it holds a stop token"
        elif prefix.ids.min() < 0 or prefix.ids.max() >= vocab_size:
            problem = f"it holds a token that is not in the vocabulary of {vocab_size}"
        if problem is not None:
            raise BackendError(
                "A rollout cannot resume from its prefix.", got=f"index {prefix.index}: {problem}", code=BAD_PREFIX
            )
        seen.add(prefix.index)
