"""Splitting sampling requests into batches for the learner's device. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echo_shared.sampling.interface import GroupRequest


def batches(requests: Sequence[GroupRequest], budget_tokens: int) -> Iterator[slice]:
    """Yield slices of consecutive requests with at most `budget_tokens` tokens, prompts included. A larger request gets
    a slice of its own.
    """
    start = total = 0
    for position, request in enumerate(requests):
        size = len(request.indices) * (len(request.prompt_ids) + request.max_tokens)
        if position > start and total + size > budget_tokens:
            yield slice(start, position)
            start, total = position, 0
        total += size
    if start < len(requests):
        yield slice(start, len(requests))
