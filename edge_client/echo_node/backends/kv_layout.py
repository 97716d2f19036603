"""Division of llama.cpp's KV cache: the number of sequences, and the faster of llama.cpp's two arrangements.

A cell holds one token's keys and values. Layers of some models keep a state of constant size instead, which counts as
`state_cells` of each sequence. Every sequence gets `cells` cells, so a started rollout always fits. Separate sequences
attend only to their own cells. Unified sequences share a prompt's cells, but compute over the cells of all sequences.
Unified is faster while there are few cells: one matrix product reads memory once instead of once per sequence.
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
    """Division of the cells (memory for one token each) of a llama.cpp context among sequences."""

    sequences: int
    cells: int
    """Cells of each sequence: its maximum number of tokens."""
    unified: bool
    keeps_prompt: bool = False
    """True: one more sequence keeps the state after a prompt. Needed for models whose states cannot be cut back to the
    prompt.
    """

    @property
    def all_sequences(self) -> int:
        return self.sequences + self.keeps_prompt

    @property
    def streams(self) -> int:
        """Number of separate arrays that hold the sequences. llama.cpp loads a saved sequence only into a context with
        the same number of arrays.
        """
        return 1 if self.unified else self.all_sequences

    def serves(self, wanted: KvLayout) -> bool:
        """Return True if changing from this layout to `wanted` would bring nothing: cells are arranged alike, and this
        layout has enough cells and sequences.
        """
        has_room = self.cells >= wanted.cells and self.sequences >= wanted.sequences
        return has_room and self.unified == wanted.unified


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlanner:
    """Plans the layouts of the KV cache, within the limits of the model and of the machine's memory."""

    width: int
    max_positions: int
    vocab_size: int
    affordable_cells: int
    state_cells: int = 0
    """Number of cells that take as much memory as one sequence's states, which do not grow with its length. 0: the
    model has no such states.
    """
    keeps_keys: bool = False
    """True: states of finished sequences are kept for later turns. Sequences then always stay separate, so that a kept
    state fits into each sequence.
    """
    may_unify: bool = True
    """False: sequences must stay separate, because the model computes differently with unified ones."""

    def check(self, request: GroupRequest) -> None:
        """Raise BackendError if the model lacks a token, or if model or memory have too few positions for a rollout."""
        check_request(request, vocab_size=self.vocab_size, max_positions=self.max_positions)
        if _length(request) > self.affordable_length:
            raise BackendError(
                "A prompt and its completion do not fit into the memory for keys and values.",
                got=f"{_length(request)} tokens, room for {self.affordable_length}; the model's own limit is "
                f"{self.max_positions}",
                do="Raise the node's kv_cache_bytes.",
                code=TOO_LONG,
            )

    @property
    def affordable_length(self) -> int:
        """Return the number of tokens of one sequence that fit into the memory, at least CELL_STEP."""
        own = self.affordable_cells // (1 + self._keeps_prompt) - self.state_cells
        return max(CELL_STEP, own - own % CELL_STEP)

    @property
    def _keeps_prompt(self) -> bool:
        return self.state_cells > 0

    def plan(self, request: GroupRequest) -> KvLayout:
        """Return the best layout for rollouts like those of `request`. Call `check` first."""
        cells = -(-_length(request) // CELL_STEP) * CELL_STEP
        affordable = self.affordable_cells // (cells + self.state_cells) - self._keeps_prompt
        sequences = max(1, min(self.width, affordable))
        # Count half of `max_tokens`: on average, unfinished rollouts have drawn half of their tokens.
        num_prompts = -(-sequences // len(request.indices))
        shared = num_prompts * len(request.prompt_ids) + sequences * request.max_tokens // 2
        own = -(-(len(request.prompt_ids) + request.max_tokens // 2) // CELL_STEP) * CELL_STEP
        unified = self.may_unify and not (self.keeps_keys and request.keep_keys) and shared <= _UNIFIED_GAIN * own
        return KvLayout(sequences=sequences, cells=cells, unified=unified, keeps_prompt=self._keeps_prompt)


def _length(request: GroupRequest) -> int:
    """Return the number of tokens fed to the model. A completion's last token is never fed."""
    return len(request.prompt_ids) + request.max_tokens - 1
