"""How many tokens a micro-batch may have, from how much memory two small ones took. Pure arithmetic: loads no torch.

A forward and backward pass holds each token's activations until the backward pass reaches them, beside what does not
depend on how many there are: gradients, a chunk of logits. So its peak is a line, bytes = fixed + per_token · tokens,
which two points give.

An example: 512 tokens take 1.5 GiB at most, 1,024 take 2.5 GiB. So it is 0.5 GiB and 2 MiB a token, and in the 70 GiB
that are free, less a tenth, 32,000 tokens fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from echo_hub.config.training_sections import LEAST_TOKENS
from echo_hub.learner.cuts import Cut

SIZES: Final = (512, 1_024)
"""Tokens of the micro-batches that are measured."""
MARGIN: Final = 0.1
"""Of the free memory, for what is allocated in pieces that do not fit into each other's places."""
MOST_TOKENS: Final = 32_768
"""More make no product of matrices faster."""
ENOUGH_TOKENS: Final = 4_096
"""Fewer make products of matrices slow: then layers are rather computed twice."""

Measure = Callable[[bool, int], int | None]
"""(gradient checkpointing, tokens) -> bytes at the peak of a forward and backward pass, over what is held before it;
None = there are not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """bytes = fixed + per_token · tokens."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> Line:
        """Two points (tokens, bytes); rising at least by a byte a token, from no less than 0."""
        slope = max(1.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(fixed=max(0.0, large[1] - slope * large[0]), per_token=slope)

    def tokens_in(self, available_bytes: float) -> int:
        """As many as fit, a multiple of the least that a micro-batch may have; 0: not even that."""
        return max(0, int((available_bytes - self.fixed) / self.per_token)) // LEAST_TOKENS * LEAST_TOKENS


def fitting_tokens(measure: Measure, *, gradient_checkpointing: bool, free_bytes: int) -> int:
    """Tokens of the largest micro-batch that fits; 0: none does."""
    small = measure(gradient_checkpointing, SIZES[0])
    if small is None:
        return 0
    large = measure(gradient_checkpointing, SIZES[1])
    if large is None:
        return SIZES[0]
    line = Line.through((SIZES[0], small), (SIZES[1], large))
    return min(MOST_TOKENS, line.tokens_in(free_bytes * (1.0 - MARGIN)))


def choose(
    measure: Measure,
    *,
    micro_batch_tokens: int,
    gradient_checkpointing: bool | None,
    longest_tokens: int,
    free_bytes: int,
) -> Cut:
    """The cut for a device with `free_bytes`; 0 tokens and None are what is to be chosen, at least one of them.

    `longest_tokens`: of one rollout, which is never split.
    """
    wanted = micro_batch_tokens or max(ENOUGH_TOKENS, longest_tokens)
    fitting = 0
    for again in (False, True) if gradient_checkpointing is None else (gradient_checkpointing,):
        fitting = fitting_tokens(measure, gradient_checkpointing=again, free_bytes=free_bytes)
        if fitting >= wanted:
            break
    # Where nothing fits, the first step says so, of its own rollouts.
    return Cut(micro_batch_tokens=micro_batch_tokens or max(LEAST_TOKENS, fitting), gradient_checkpointing=again)
