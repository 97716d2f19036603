"""How llama.cpp's KV cache is divided: as many rollouts at once as fit, and which of its two arrangements is faster.

Every sequence has `cells` of room, whatever the others do, so that a rollout that was started always fits. Separate
sequences attend to their own cells only; unified ones share a prompt's cells but compute over the cells of all, which
pays as long as those are few: one product of matrices over them reads memory once, not once a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_node.backends.base import TOO_LONG, check_request
from echo_shared.errors import BackendError
from echo_shared.sampling import GroupRequest

CELL_STEP: Final = 256
"""llama.cpp computes attention over a multiple of this."""

_UNIFIED_GAIN: Final = 3
"""A cell costs a rollout this much less in one product over the cells of all than in a product of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How a llama.cpp context divides its cells among sequences."""

    sequences: int
    cells: int
    """Tokens that each sequence has room for."""
    unified: bool

    def serves(self, wanted: KvLayout) -> bool:
        """Whether it does all that `wanted` would do, so that nothing is gained by the change."""
        has_room = self.cells >= wanted.cells and self.sequences >= wanted.sequences
        return has_room and self.unified == wanted.unified


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlanner:
    """What the model and the machine allow."""

    width: int
    max_positions: int
    vocab_size: int
    affordable_cells: int

    def check(self, request: GroupRequest) -> None:
        """Raises BackendError when the model has no such token, or model or memory not enough positions."""
        check_request(request, vocab_size=self.vocab_size, max_positions=self.max_positions)
        if _length(request) > self.affordable_cells:
            raise BackendError(
                "A prompt and its completion do not fit into the memory for keys and values.",
                got=f"{_length(request)} tokens, room for {self.affordable_cells}; "
                f"the model itself would take {self.max_positions}",
                do="Raise the node's kv_cache_bytes.",
                code=TOO_LONG,
            )

    def plan(self, request: GroupRequest) -> KvLayout:
        """The best layout for rollouts like those of `request`, which has been checked."""
        cells = -(-_length(request) // CELL_STEP) * CELL_STEP
        sequences = max(1, min(self.width, self.affordable_cells // cells))
        # Rollouts in progress have drawn half of their tokens, on average.
        num_prompts = -(-sequences // len(request.indices))
        shared = num_prompts * len(request.prompt_ids) + sequences * request.max_tokens // 2
        own = -(-(len(request.prompt_ids) + request.max_tokens // 2) // CELL_STEP) * CELL_STEP
        return KvLayout(sequences=sequences, cells=cells, unified=shared <= _UNIFIED_GAIN * own)


def _length(request: GroupRequest) -> int:
    """A completion's last token is never fed."""
    return len(request.prompt_ids) + request.max_tokens - 1
