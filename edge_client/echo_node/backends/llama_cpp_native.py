"""One llama.cpp model with one context, through the low-level bindings: batches in, logits out, no sampling.

In float32, flash attention stays off: it rounds keys and values to 16 bits, whatever type they are stored in. Wrong
calls can abort the process, which is one reason for running engines in child processes.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from echo_node.backends.base import OUT_OF_MEMORY
from echo_node.backends.kv_layout import KvLayout
from echo_node.backends.llama_cpp_rpc import Helpers
from echo_shared.errors import BackendError
from echo_shared.gguf.llama_cpp_devices import load_devices

_LOG_ERROR: Final = 4
_GGML_TYPE_F32: Final = 0
_GGML_TYPE_F16: Final = 1
_FLASH_ATTENTION_OFF: Final = 0
_FLASH_ATTENTION_AUTO: Final = -1
_KV_FULL: Final = 1
_ALLOCATION_FAILED: Final = -2
_MEMORY_TROUBLE: Final = re.compile(r"alloc|out of memory|not enough (memory|space)", re.IGNORECASE)

_errors: deque[str] = deque(maxlen=8)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _user_data: object) -> None:
    if level == _LOG_ERROR:
        line = text.decode(errors="replace")
        _errors.append(line.strip())
        sys.stderr.write(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    batch_tokens: int
    """Maximum tokens that llama.cpp takes in one batch."""
    threads: int
    """CPU threads until the first `set_threads`."""
    exact: bool
    """True: attention in float32. False: in float16."""
    num_layers: int
    gpu: bool = False
    helpers: tuple[str, ...] = ()
    doors: tuple[int, ...] = ()
    """Listening sockets, one for each of `helpers`: see `EngineSettings.doors`."""


class LlamaContext:
    """A llama.cpp model with its context, held as native handles, which `close` frees.

    `load_adapter` may be called from any thread; a lock keeps it apart from decoding, because llama.cpp sizes its
    compute graphs by the loaded adapters. All other calls come from one thread.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._context: Any = None
        self._adapter: Any = None
        self._logits_at: int | None = None
        self._devices = threading.Lock()
        self._helpers: Helpers | None = None

    def open(self, model: Path, options: ModelOptions) -> None:
        """Load the model. Call `reserve` next. Raises BackendError."""
        llama_cpp.llama_log_set(_log, None)
        load_devices()
        llama_cpp.llama_backend_init()
        _errors.clear()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1 if options.gpu else 0
        if options.helpers:
            self._helpers = Helpers()
            self._helpers.open(options.helpers, options.doors)
            model_bytes = model.stat().st_size
            self._helpers.place(params, num_layers=options.num_layers, model_bytes=model_bytes, gpu=options.gpu)
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise _failure("llama.cpp could not load the base model.", str(model))
        self._options = options
        self._threads = options.threads
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    @property
    def batch_tokens(self) -> int:
        return self._options.batch_tokens

    def reserve(self, layout: KvLayout) -> None:
        """Allocate empty sequences in place of the old ones. Raises BackendError."""
        with self._devices:
            self._free_context()
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = layout.all_sequences * layout.cells
            params.n_seq_max = layout.all_sequences
            params.kv_unified = layout.unified
            # In layers with sliding windows, keep the keys and values of all tokens, so that sequences can be cut back.
            params.swa_full = True
            params.n_batch = params.n_ubatch = self._options.batch_tokens
            params.n_threads = params.n_threads_batch = self._threads
            exact = self._options.exact
            params.flash_attn_type = _FLASH_ATTENTION_OFF if exact else _FLASH_ATTENTION_AUTO
            params.type_k = params.type_v = _GGML_TYPE_F32 if exact else _GGML_TYPE_F16
            _errors.clear()
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if not self._context:
                raise _failure(
                    "llama.cpp could not allocate its context.",
                    f"{layout.sequences} sequences of {layout.cells} tokens",
                    do="Lower the node's kv_cache_bytes or width.",
                    code=OUT_OF_MEMORY,
                )
            self._memory = llama_cpp.llama_get_memory(self._context)
            self._apply_adapter()
            self._map_batch(layout.all_sequences)

    def set_threads(self, count: int) -> None:
        if count != self._threads:
            self._threads = count
            if self._context:
                llama_cpp.llama_set_n_threads(self._context, count, count)

    def _map_batch(self, sequences: int) -> None:
        """Allocate numpy arrays that llama.cpp reads in place, so that vector assignments fill a batch."""
        count = self._options.batch_tokens
        self._tokens = np.zeros(count, np.int32)
        self._positions = np.zeros(count, np.int32)
        self._wanted = np.zeros(count, np.int8)
        self._ones = np.ones(count, np.int32)
        self._ids = np.arange(sequences, dtype=np.int32)
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

    def feed_prompt(self, tokens: NDArray[np.int32], begin: int, sequence: int) -> NDArray[np.float32]:
        """Feed a piece of a prompt, whose first token has position `begin`. Return the last token's logits, [1,
        vocabulary].

        A piece has at most `batch_tokens` tokens. The result is llama.cpp's own memory, valid until the next call.
        """
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(begin, begin + count)
        self._sequences[:count] = self._id_addresses[sequence]
        self._wanted[: count - 1] = 0
        self._wanted[count - 1] = 1
        return self._decode(count, 1)

    def feed_scored(self, tokens: NDArray[np.int32], begin: int) -> NDArray[np.float32]:
        """Feed a piece to sequence 0, from position `begin` on. Return the logits after each token, [tokens,
        vocabulary].

        The limits of `feed_prompt` apply.
        """
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(begin, begin + count)
        self._sequences[:count] = self._id_addresses[0]
        self._wanted[:count] = 1
        return self._decode(count, count)

    def feed_rows(self, tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Feed one token to each of the first sequences. Return their logits, [sequences, vocabulary].

        The result is llama.cpp's own memory, valid until the next call.
        """
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = self._id_addresses[:count]
        self._wanted[:count] = 1
        return self._decode(count, count)

    def _decode(self, num_tokens: int, num_wanted: int) -> NDArray[np.float32]:
        assert 0 < num_tokens <= len(self._tokens)
        self._batch.n_tokens = num_tokens
        with self._devices:
            status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            is_memory = status in (_KV_FULL, _ALLOCATION_FAILED)
            raise BackendError(
                "llama.cpp could not decode a batch.",
                got=f"status {status} for {num_tokens} tokens",
                do="Lower the node's width or kv_cache_bytes." if is_memory else None,
                code=OUT_OF_MEMORY if is_memory else None,
            )
        # llama_get_logits waits for the devices and sorts the rows into the batch's order.
        address = ctypes.addressof(llama_cpp.llama_get_logits(self._context).contents)
        if address != self._logits_at:
            row_type = ctypes.c_float * self._vocabulary
            # Only the first `num_wanted` rows hold data.
            self._logits = np.ctypeslib.as_array((row_type * len(self._tokens)).from_address(address))
            self._logits_at = address
        return self._logits[:num_wanted]

    def copy_sequence(self, source: int, target: int) -> None:
        """Copy all tokens of sequence `source` to sequence `target`, which must be empty."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def remove_sequence(self, sequence: int, begin: int = 0) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, begin, -1)

    def read_sequence(self, sequence: int) -> NDArray[np.uint8]:
        """Return a copy of a sequence's keys and values, in host memory."""
        with self._devices:
            state = np.empty(llama_cpp.llama_state_seq_get_size(self._context, sequence), np.uint8)
            count = llama_cpp.llama_state_seq_get_data(self._context, _pointer(state), len(state), sequence)
        return state[:count]

    def write_sequence(self, sequence: int, state: NDArray[np.uint8]) -> bool:
        """Fill an empty sequence with a state of `read_sequence`, of this model and precision. Return False if its
        cells do not fit; the sequence is then empty.
        """
        with self._devices:
            return bool(llama_cpp.llama_state_seq_set_data(self._context, _pointer(state), len(state), sequence))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def load_adapter(self, path: Path) -> Any:
        """Load an adapter, and return its handle for `set_adapter`. Raises BackendError if the adapter does not fit the
        model.
        """
        with self._devices:
            _errors.clear()
            adapter = llama_cpp.llama_adapter_lora_init(self._model, str(path).encode())
            if not adapter:
                raise _failure("llama.cpp could not load an adapter.", str(path))
            return adapter

    def set_adapter(self, adapter: Any) -> None:
        """Use this adapter, or none, from now on. All sequences are emptied, because their keys and values come from
        the old one.
        """
        self._adapter = adapter
        if self._context:
            with self._devices:
                self._apply_adapter()
            self.clear()

    def _apply_adapter(self) -> None:
        adapters = [] if self._adapter is None else [self._adapter]
        count = len(adapters)
        llama_cpp.llama_set_adapters_lora(
            self._context,
            (llama_cpp.llama_adapter_lora_p_ctypes * count)(*adapters),
            count,
            (ctypes.c_float * count)(*[1.0] * count),
        )

    def free_adapter(self, adapter: Any) -> None:
        """Free an adapter that is not in use. (llama.cpp would still read one in use.)

        Allowed after `close`, which has freed all adapters.
        """
        assert adapter is not self._adapter
        if self._model:
            with self._devices:
                llama_cpp.llama_adapter_lora_free(adapter)

    def close(self) -> None:
        self._adapter = None
        self._free_context()
        if self._model:
            llama_cpp.llama_model_free(self._model)
        self._model = None
        if self._helpers is not None:
            self._helpers.close()
        self._helpers = None

    def _free_context(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        self._context = self._memory = self._logits_at = None


def _pointer(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _failure(what: str, got: str, *, do: str | None = None, code: str | None = None) -> BackendError:
    """Return the error with llama.cpp's last messages. If the messages mention memory, the error's code is
    OUT_OF_MEMORY.
    """
    said = "; ".join(_errors)
    if _MEMORY_TROUBLE.search(said):
        code, do = OUT_OF_MEMORY, do or "Choose a lower precision for this node, or a machine with more memory."
    return BackendError(what, got=f"{got}: {said}" if said else got, do=do, code=code)
