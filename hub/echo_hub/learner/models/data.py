"""Pack the data of a request into micro-batches. A micro-batch is one sequence without padding; each datum is a row.

Every position of a datum predicts its target, so the pass returns a log-probability for each. However the data are
divided, the sum over micro-batches is the same except for rounding.

Data of one group of samples begin with the same prompt. Neighbouring rows with a long common beginning have it once in
the sequence; each row then has its own targets at the common positions.

Dimensions: T positions of the packed sequence, N positions of all rows, row after row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner.batch import evened, lay_out
from echo_hub.learner.device import moved
from echo_hub.learner.packing import Rows

LEAST_SHARED: Final = 8
"""Shortest common beginning, in tokens, that two rows share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Token rows as the input of one forward pass. The pass yields hidden states for all positions, row after row."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    rows: Rows
    predictors_N: Tensor
    lengths: tuple[int, ...]
    """Number of tokens of each row."""
    routes_TB: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.int32]], device: torch.device) -> PackedRows:
        ids, positions, places = list[NDArray[np.int64]](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        end, shared = 0, np.zeros(0, np.int64)
        for number, row in enumerate(rows):
            if not len(shared) or _common(row, rows[number - 1]) < len(shared):
                # Start a new common beginning with the next row.
                length = _common(row, rows[number + 1]) if number + 1 < len(rows) else 0
                shared = np.arange(end, end + (length if length >= LEAST_SHARED else 0))
                known = 0
            else:
                known = len(shared)
            own = np.arange(end, end + len(row) - known)
            places.append(np.concatenate((shared[:known], own)))
            ids.append(row[known:].astype(np.int64))
            positions.append(np.arange(known, len(row)))
            end += len(own)
        return cls(
            input_ids_T=_on(np.concatenate(ids), device),
            position_ids_T=_on(np.concatenate(positions), device),
            rows=lay_out(places, end).to(device),
            predictors_N=_on(np.concatenate(places), device),
            lengths=tuple(len(row) for row in rows),
        )


def divided(lengths: Sequence[int], tokens: int) -> Iterator[range]:
    """Yield the indices of the rows of each micro-batch, in order: as few micro-batches as `tokens` allow, of even
    sizes. A row longer than `tokens` gets its own.
    """
    budget = evened(lengths, tokens)
    start = total = 0
    for number, length in enumerate(lengths):
        if total and total + length > budget:
            yield range(start, number)
            start, total = number, 0
        total += length
    yield range(start, len(lengths))


def halved(lengths: Sequence[int], tokens: int) -> int | None:
    """Return half the size, in tokens, of the largest micro-batch that has several rows. Return None if every
    micro-batch has a single row.
    """
    several = [sum(lengths[row] for row in rows) for rows in divided(lengths, tokens) if len(rows) > 1]
    return max(1, max(several) // 2) if several else None


def _common(row: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the rows' common beginning, in tokens."""
    length = min(len(row), len(other))
    differ = np.flatnonzero(row[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _on(values: NDArray[Any], device: torch.device) -> Tensor:
    return moved(torch.from_numpy(values), device)
