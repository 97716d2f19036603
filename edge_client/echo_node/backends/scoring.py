"""Splits the recomputation of a completion into pieces, so that the logits stay within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.sampling import draws
from echo_shared.sampling.scoring import Intervals

_CHUNK_VALUES: Final = 2**20
_PIECE_VALUES: Final = 2**24
"""Maximum number of logits computed at a time."""


def pieces(num_tokens: int, first: int, *, vocab_size: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, wanted) for each piece `ids[begin:end]` to feed; `wanted` is the number of logit rows that the
    caller needs: all rows of the piece, or 0.

    Of the `num_tokens` ids, the last one is never fed. The first wanted row is the one after id `first` - 1, from which
    id `first` is drawn. No piece has more than `most` ids.
    """
    begin = 0
    while begin < num_tokens - 1:
        # Logits are needed only from row `first` - 1 on. Earlier pieces may therefore be as long as the device allows.
        wanted_from = first - 1
        end = min(begin + most, num_tokens - 1)
        if begin >= wanted_from:
            end = min(end, begin + max(1, _PIECE_VALUES // vocab_size))
        elif end > wanted_from:
            end = wanted_from
        yield begin, end, end - begin if begin >= wanted_from else 0
        begin = end


def intervals(logits_RV: NDArray[np.float32], tokens_R: NDArray[np.int32], temperature: float) -> Intervals:
    """Apply `echo_shared.sampling.draws.interval` to a few rows at a time, because the conversion to float64 doubles
    the logits' memory.
    """
    chunk = max(1, _CHUNK_VALUES // logits_RV.shape[1])
    parts = [
        draws.interval(logits_RV[start : start + chunk], tokens_R[start : start + chunk], temperature)
        for start in range(0, len(tokens_R), chunk)
    ]
    return np.concatenate([below for below, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])


def joined(parts: list[Intervals]) -> Intervals:
    return np.concatenate([below for below, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])
