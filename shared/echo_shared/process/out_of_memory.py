"""Recognizes PyTorch's out-of-memory errors, of a device or of the host, without importing torch."""

from __future__ import annotations

from typing import Final

_WORDS: Final = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed", "bad allocation")
"""Lower-case parts of the texts of RuntimeErrors that report a lack of memory, from PyTorch, CUDA, HIP, Metal, cuBLAS
and cuDNN.
"""


def ran_out(error: BaseException) -> bool:
    """Return True if memory ran out, so that a retry with smaller pieces of work may succeed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
