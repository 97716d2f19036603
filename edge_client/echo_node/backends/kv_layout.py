"""Division of llama.cpp's KV cache: the number of sequences, and the faster of llama.cpp's two arrangements.

A cell holds one token's keys and values. Every sequence has `cells` cells of its own, so a started rollout always fits.
Separate sequences attend only to their own cells. Unified sequences share a prompt's cells, but compute over the cells
of all sequences. Unified is faster while there are few cells: one matrix product reads memory once instead of once per
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_node.backends.base import TOO_LONG, check_request
from echo_shared.errors import BackendError
from echo_shared.sampling.interface import GroupRequest

CELL_STEP: Final = 256
"""llama.cpp computes attention over a multiple of this number of cells (a cell holds one token's keys and values)."""

_UNIFIED_GAIN: Final = 3
"""Unified sequences, which share cells, are faster while all cells together are at most this multiple of the cells of
one separate sequence.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Division of a llama.cpp context's cells among sequences."""

    sequences: int
    cells: int
    """Cells of each sequence: its maximum number of tokens."""
    unified: bool

    def serves(self, wanted: KvLayout) -> bool:
        """Return True if a change from this layout to `wanted` would gain nothing: the arrangement is the same, and
        there are enough cells and sequences.
        """
        has_room = self.cells >= wanted.cells and self.sequences >= wanted.sequences
        return has_room and self.unified == wanted.unified


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlanner:
    """Limits of the model and the machine, from which layouts are planned."""

    width: int
    max_positions: int
    vocab_size: int
    affordable_cells: int

    def check(self, request: GroupRequest) -> None:
        """Raise BackendError if the model lacks a token, or if model or memory have too few positions for a rollout."""
        check_request(request, vocab_size=self.vocab_size, max_positions=self.max_positions)
        if _length(request) > self.affordable_cells:
            raise BackendError(
                "A prompt and its completion do not fit into the memory for keys and values.",
                got=f"{_length(request)} tokens, room for {self.affordable_cells}; the model's own limit is "
                f"{self.max_positions}",
                do="Raise the node's kv_cache_bytes.",
                code=TOO_LONG,
            )

    def plan(self, request: GroupRequest) -> KvLayout:
        """Return the best layout for rollouts like those of `request`. Call `check` first."""
        cells = -(-_length(request) // CELL_STEP) * CELL_STEP
        sequences = max(1, min(self.width, self.affordable_cells // cells))
        # Count half of `max_tokens`: on average, unfinished rollouts have drawn half of their tokens.
        num_prompts = -(-sequences // len(request.indices))
        shared = num_prompts * len(request.prompt_ids) + sequences * request.max_tokens // 2
        own = -(-(len(request.prompt_ids) + request.max_tokens // 2) // CELL_STEP) * CELL_STEP
        return KvLayout(sequences=sequences, cells=cells, unified=shared <= _UNIFIED_GAIN * own)


def _length(request: GroupRequest) -> int:
    """Return the number of tokens fed to the model. A completion's last token is never fed."""
    return len(request.prompt_ids) + request.max_tokens - 1
