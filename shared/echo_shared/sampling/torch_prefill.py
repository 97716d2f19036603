"""Decides which prompts the PyTorch sampler prefills together, in one forward pass."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache

PREFILL_TOKENS: Final = 2_048
"""Maximum tokens of one prefill, padding included. A longer prompt is prefilled alone."""
CACHED: Final = 8
"""A prefill counts this many cached tokens as one token, because reading them costs little."""
ALIKE_TOKENS: Final = 64
"""Number of needless tokens that a prefill may compute because its prompts have different lengths."""


class PrefillSize:
    """Size of one prefill, in prompts and in tokens with padding. `pads`: prompts may have different lengths."""

    def __init__(self, *, pads: bool, prefixes: TorchPrefixCache | None) -> None:
        self._pads = pads
        self._prefixes = prefixes if prefixes is not None and prefixes.cuts else None
        self._prompts = self._longest = self._computed = self._needed = 0

    def add(self, ids_T: NDArray[np.int32], version: int) -> bool:
        """Add a prompt [T] if it fits, and return True if so. The first prompt always fits."""
        length = needed = len(ids_T)
        if self._prefixes is not None:
            needed -= self._prefixes.shared(ids_T, version=version)
        prompts, longest, computed = self._prompts + 1, max(self._longest, length), max(self._computed, needed)
        if self._prompts and not self._pads and length != self._longest:
            return False
        if self._prompts and prompts * (computed + (longest - computed) // CACHED) > PREFILL_TOKENS:
            return False
        # A prefill computes equally many tokens of each prompt: as many as the prompt with the most uncached tokens
        # needs. Keep prompts that need many tokens apart from those that need few.
        if self._prompts and self._prefixes and prompts * computed > 2 * (self._needed + needed) + ALIKE_TOKENS:
            return False
        self._prompts, self._longest, self._computed = prompts, longest, computed
        self._needed += needed
        return True
