"""Which errors mean that a device, or the host, has too little memory, however PyTorch says it. Loads no torch."""

from __future__ import annotations

from typing import Final

_WORDS: Final = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed", "bad allocation")
"""How PyTorch, CUDA, HIP, Metal, cuBLAS and cuDNN word a RuntimeError of that kind, in lower case."""


def ran_out(error: BaseException) -> bool:
    """Whether `error` says so: then the same work in smaller parts may succeed."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
