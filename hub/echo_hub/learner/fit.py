"""The largest micro-batch that fits in memory, computed from the peaks of two small ones. Loads no torch.

Each token's activations are held until the backward pass reaches them. Gradients and one chunk of logits take
constant memory. So peak memory is a line, bytes = fixed + per_token · tokens, which two points
determine.

Example: 512 tokens need 1.5 GiB and 1,024 tokens 2.5 GiB. So fixed is 0.5 GiB and per_token 2 MiB. With 70 GiB free,
minus a tenth, 32,000 tokens fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from echo_hub.config.training_sections import LEAST_TOKENS
from echo_hub.learner.cuts import ChunkSizes

SIZES: Final = (512, 1_024)
"""Numbers of tokens in the two micro-batches whose memory is measured."""
MARGIN: Final = 0.1
"""Share of the free memory kept in reserve for fragmentation."""
MOST_TOKENS: Final = 32_768
"""Upper limit of a micro-batch, in tokens. Larger micro-batches do not speed up matrix products."""
ENOUGH_TOKENS: Final = 4_096
"""Size of a micro-batch, in tokens, below which matrix products are slow. If less fits, larger micro-batches with
gradient checkpointing are faster."""


class PassMeasure(Protocol):
    """Measures how much memory a forward and backward pass takes."""

    def peak_bytes(self, tokens: int, *, gradient_checkpointing: bool) -> int | None:
        """Return the peak bytes that a pass of this many tokens allocates; None if memory is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """The line bytes = fixed + per_token · tokens, which gives the peak memory of a micro-batch."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> MemoryLine:
        """Return the line through two points (tokens, bytes), with a slope of at least 1 and a fixed part of at least
        0.
        """
        slope = max(1.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(fixed=max(0.0, large[1] - slope * large[0]), per_token=slope)

    def tokens_in(self, available_bytes: float) -> int:
        """Return the number of tokens that fit, a multiple of LEAST_TOKENS; 0 if fewer than LEAST_TOKENS fit."""
        return max(0, int((available_bytes - self.fixed) / self.per_token)) // LEAST_TOKENS * LEAST_TOKENS


def fitting_tokens(measure: PassMeasure, *, gradient_checkpointing: bool, free_bytes: int) -> int:
    """Return the tokens of the largest micro-batch that fits; 0 if none does."""
    small = measure.peak_bytes(SIZES[0], gradient_checkpointing=gradient_checkpointing)
    if small is None:
        return 0
    large = measure.peak_bytes(SIZES[1], gradient_checkpointing=gradient_checkpointing)
    if large is None:
        return SIZES[0]
    line = MemoryLine.through((SIZES[0], small), (SIZES[1], large))
    return min(MOST_TOKENS, line.tokens_in(free_bytes * (1.0 - MARGIN)))


def choose(
    measure: PassMeasure,
    *,
    micro_batch_tokens: int,
    gradient_checkpointing: bool | None,
    longest_tokens: int,
    free_bytes: int,
) -> ChunkSizes:
    """Return the memory settings for a device with `free_bytes`.

    Pass 0 as `micro_batch_tokens`, or None as `gradient_checkpointing`, or both: such a value is chosen here.
    `longest_tokens` is the length of the longest rollout, which is never split.
    """
    wanted = micro_batch_tokens or max(ENOUGH_TOKENS, longest_tokens)
    fitting = 0
    for again in (False, True) if gradient_checkpointing is None else (gradient_checkpointing,):
        fitting = fitting_tokens(measure, gradient_checkpointing=again, free_bytes=free_bytes)
        if fitting >= wanted:
            break
    # If nothing fits, continue with the minimum: the first step then reports the error for its actual rollouts.
    return ChunkSizes(micro_batch_tokens=micro_batch_tokens or max(LEAST_TOKENS, fitting), gradient_checkpointing=again)
