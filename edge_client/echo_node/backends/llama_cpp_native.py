"""One llama.cpp model with one context, through the low-level bindings: batches in, logits out, no sampling.

Sequences share the KV cache (`kv_unified`), so a copied prompt costs no memory. Flash attention stays off: it rounds
keys and values to 16 bits whatever the cache's type. Misuse can abort the process, which is why engines are children.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import BackendError

_LOG_ERROR: Final = 4
_GGML_TYPE_F32: Final = 0
_GGML_TYPE_F16: Final = 1
_FLASH_ATTENTION_OFF: Final = 0


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _user_data: object) -> None:
    if level == _LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSize:
    """What is allocated when the context is opened."""

    cells: int
    """Tokens in the KV cache, all sequences together."""
    sequences: int
    batch_tokens: int
    threads: int
    exact_kv: bool
    """Keys and values in float32, else float16."""


class LlamaContext:
    """Native handles; `close` frees them. All methods from one thread."""

    def __init__(self) -> None:
        self._model: Any = None
        self._context: Any = None
        self._memory: Any = None
        self._adapter: Any = None

    def open(self, model: Path, size: ContextSize, *, gpu: bool) -> None:
        llama_cpp.llama_log_set(_log, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = -1 if gpu else 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), model_params)
        if not self._model:
            raise BackendError(
                "llama.cpp could not load the base model.",
                got=str(model),
                do="Delete the file; it is made again by itself.",
            )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = size.cells
        params.n_seq_max = size.sequences
        params.n_batch = params.n_ubatch = size.batch_tokens
        params.n_threads = params.n_threads_batch = size.threads
        params.flash_attn_type = _FLASH_ATTENTION_OFF
        params.type_k = params.type_v = _GGML_TYPE_F32 if size.exact_kv else _GGML_TYPE_F16
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise BackendError(
                "llama.cpp could not allocate its context.",
                got=f"{size.cells} tokens in {size.sequences} sequences",
                do="Lower the node's kv_cache_bytes or width.",
            )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._map_batch(size)

    def _map_batch(self, size: ContextSize) -> None:
        """Numpy arrays that llama.cpp reads in place: a batch is then filled by vector assignments."""
        count = size.batch_tokens
        self._tokens = np.zeros(count, np.int32)
        self._positions = np.zeros(count, np.int32)
        self._wanted = np.zeros(count, np.int8)
        self._ones = np.ones(count, np.int32)
        self._ids = np.arange(size.sequences, dtype=np.int32)
        self._id_addresses = np.uint64(self._ids.ctypes.data) + np.uint64(4) * self._ids.astype(np.uint64)
        self._sequences = np.full(count, self._id_addresses[0], np.uint64)
        int32 = ctypes.POINTER(ctypes.c_int32)
        self._batch = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(int32),
            pos=self._positions.ctypes.data_as(int32),
            n_seq_id=self._ones.ctypes.data_as(int32),
            seq_id=self._sequences.ctypes.data_as(ctypes.POINTER(int32)),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int64],
        wanted: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        """Feeds one batch, one item a token; returns the logits of the wanted ones, in order, [wanted, vocabulary].

        The result is llama.cpp's own memory, valid until the next call. At most `batch_tokens` tokens.
        """
        count = len(tokens)
        assert 0 < count <= len(self._tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = self._id_addresses[sequences]
        self._wanted[:count] = wanted
        self._batch.n_tokens = count
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise BackendError("llama.cpp could not decode a batch.", got=f"status {status} for {count} tokens")
        num_wanted = int(np.count_nonzero(wanted))
        if num_wanted == 0:
            return np.empty((0, self._vocabulary), np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(num_wanted, self._vocabulary))

    def copy_sequence(self, source: int, target: int) -> None:
        """`target` must be empty."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def remove_sequence(self, sequence: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Empties all sequences."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def set_adapter(self, path: Path | None) -> None:
        """Replaces the adapter, and empties all sequences: their keys and values were the old adapter's."""
        new = None
        if path is not None:
            new = llama_cpp.llama_adapter_lora_init(self._model, str(path).encode())
            if not new:
                raise BackendError("llama.cpp could not load an adapter.", got=str(path))
        old, self._adapter = self._adapter, new
        count = 0 if new is None else 1
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * count)(*([] if new is None else [new]))
        llama_cpp.llama_set_adapters_lora(self._context, adapters, count, (ctypes.c_float * count)(*[1.0] * count))
        self.clear()
        # Freeing an adapter that is still set crashes later, so the old one goes last.
        if old is not None:
            llama_cpp.llama_adapter_lora_free(old)

    def close(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        if self._adapter:
            llama_cpp.llama_adapter_lora_free(self._adapter)
        if self._model:
            llama_cpp.llama_model_free(self._model)
        self._model = self._context = self._memory = self._adapter = None
