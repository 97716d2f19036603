"""Recognizes PyTorch's out-of-memory errors, of a device or the host. Does not import torch."""

from __future__ import annotations

from typing import Final

_WORDS: Final = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed", "bad allocation")
"""Texts of such RuntimeErrors in PyTorch, CUDA, HIP, Metal, cuBLAS and cuDNN, in lower case."""


def ran_out(error: BaseException) -> bool:
    """Return True if `error` means out of memory, so that smaller parts of the work may succeed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
