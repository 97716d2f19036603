"""What every sampling engine takes and gives: one group to draw, rollouts in progress and finished. Ids in, ids out.

Draw t of a completion follows from (seed, index, t) alone, so one that was cut anywhere goes on elsewhere: a request
that carries what was drawn so far, as a `Prefix`, gives the completion that its first sampler would have given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import BackendError
from echo_shared.messages import FinishReason

BAD_PREFIX: Final = "bad_prefix"
"""Code of the BackendError for a request with a prefix that no completion of it could go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The tokens of rollout `index` that were drawn before: the beginning of its completion."""

    index: int
    ids: NDArray[np.int32]
    """[T]; the next token is draw number T."""
    logprobs: NDArray[np.float32]
    """[T], in nats, as whoever drew them gave them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The rollouts `indices` of one group: one prompt, drawn by `policy_version` as `echo_shared.draws` defines."""

    lease_id: int
    group_id: int
    indices: tuple[int, ...]
    prompt_ids: NDArray[np.int32]
    seed: int
    policy_version: int
    temperature: float
    max_tokens: int
    """Of the completion, its prefix and the stop token included."""
    stop_ids: tuple[int, ...]
    prefixes: tuple[Prefix, ...] = ()
    """At most one an index; a rollout without one begins at its first token."""

    @property
    def fresh(self) -> tuple[int, ...]:
        """The indices without a prefix."""
        if not self.prefixes:
            return self.indices
        begun = {prefix.index for prefix in self.prefixes}
        return tuple(index for index in self.indices if index not in begun)

    def starts(self) -> list[tuple[NDArray[np.int32], tuple[int, ...]]]:
        """What is fed before the first draw, and for which indices: the prompt for all fresh ones, then the prompt and
        its prefix for each other one."""
        alike = [(self.prompt_ids, self.fresh)] if self.fresh else []
        return alike + [(np.concatenate([self.prompt_ids, one.ids]), (one.index,)) for one in self.prefixes]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPart:
    """What is new of one rollout in progress: its tokens from number `start` on."""

    lease_id: int
    index: int
    policy_version: int
    start: int
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """In nats, one a token."""
    sampling_s: float = 0.0
    """From the start of its prompt's prefill to its newest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """One completion. A drawn stop token is its last token; `behavior_logprobs` in nats, one a token."""

    lease_id: int
    group_id: int
    index: int
    policy_version: int
    completion_ids: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    sampling_s: float
    """From the start of its prompt's prefill to its last token."""
    num_given: int = 0
    """Tokens at its beginning that the request gave as a prefix."""


def check_prefixes(request: GroupRequest, *, vocab_size: int) -> None:
    """Raises BackendError when a prefix is not the beginning of an unfinished completion of this request."""
    seen: set[int] = set()
    for prefix in request.prefixes:
        count, problem = len(prefix.ids), None
        if prefix.index not in request.indices or prefix.index in seen:
            problem = "it is for no index of the request, or the second one for it"
        elif count == 0 or len(prefix.logprobs) != count:
            problem = f"{count} tokens and {len(prefix.logprobs)} log-probabilities"
        elif count >= request.max_tokens:
            problem = f"it has ended: {count} tokens of {request.max_tokens}"
        elif np.isin(prefix.ids, request.stop_ids).any():
            problem = "it has ended: it holds a stop token"
        elif prefix.ids.min() < 0 or prefix.ids.max() >= vocab_size:
            problem = f"it holds a token that is not in the vocabulary of {vocab_size}"
        if problem is not None:
            raise BackendError(
                "A rollout cannot go on from its prefix.", got=f"index {prefix.index}: {problem}", code=BAD_PREFIX
            )
        seen.add(prefix.index)
