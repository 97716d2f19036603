"""The ceiling of llama.cpp's speed: the engine's calls into llama.cpp are recorded, then repeated without sampling and
without Python between them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self
from unittest import mock

import llama_cpp
import numpy as np
from numpy.typing import NDArray

NOTED: Final = ("llama_decode", "llama_memory_seq_cp", "llama_memory_seq_rm", "llama_memory_clear")


@dataclass(frozen=True, slots=True)
class _Batch:
    """A copy of a llama.cpp batch in its own memory. The engine's batch points into buffers that change."""

    native: llama_cpp.llama_batch
    kept: tuple[NDArray[Any], ...]

    @classmethod
    def copy_of(cls, batch: llama_cpp.llama_batch) -> Self:
        count = batch.n_tokens
        tokens, positions, num_sequences, sequences, wanted = (
            np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (count,)).copy()
            for pointer, kind in (
                (batch.token, ctypes.c_int32),
                (batch.pos, ctypes.c_int32),
                (batch.n_seq_id, ctypes.c_int32),
                (batch.seq_id, ctypes.c_uint64),
                (batch.logits, ctypes.c_int8),
            )
        )
        int32 = ctypes.POINTER(ctypes.c_int32)
        native = llama_cpp.llama_batch(
            n_tokens=count,
            token=tokens.ctypes.data_as(int32),
            pos=positions.ctypes.data_as(int32),
            n_seq_id=num_sequences.ctypes.data_as(int32),
            seq_id=sequences.ctypes.data_as(ctypes.POINTER(int32)),
            logits=wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        return cls(native, (tokens, positions, num_sequences, sequences, wanted))


class Recording:
    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._batches: list[_Batch] = []

    @classmethod
    def of(cls, work: Callable[[], object]) -> Self:
        recording = cls()
        with ExitStack() as stack:
            for name in NOTED:
                stack.enter_context(mock.patch.object(llama_cpp, name, recording._noting(getattr(llama_cpp, name))))
            work()
        return recording

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            kept = list(arguments)
            for place, argument in enumerate(arguments):
                if isinstance(argument, llama_cpp.llama_batch):
                    batch = _Batch.copy_of(argument)
                    self._batches.append(batch)
                    kept[place] = batch.native
            self._calls.append((function, tuple(kept)))
            return function(*arguments)

        return note

    def replay(self) -> float:
        """Repeat the recorded calls into llama.cpp; return the seconds that they took. Raises RuntimeError if a call
        fails.
        """
        began = time.perf_counter()
        results = [function(*arguments) for function, arguments in self._calls]
        seconds = time.perf_counter() - began
        failed = [r for (f, _), r in zip(self._calls, results, strict=True) if f is llama_cpp.llama_decode and r != 0]
        if failed:
            raise RuntimeError(f"{len(failed)} replayed batches failed")
        return seconds
