"""Logits of a GGUF file, computed by llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from echo_node.backends.kv_layout import KvLayout
from echo_node.backends.llama_cpp_native import LlamaContext, ModelOptions

_TOGETHER = 0.8
"""Share of a text that is computed several tokens at a time. The rest is computed token by token."""
_PIECE = 50


def open_model(gguf: Path, *, exact: bool = True) -> LlamaContext:
    llama = LlamaContext()
    llama.open(gguf, ModelOptions(batch_tokens=_PIECE, threads=1, exact=exact, num_layers=4))
    llama.reserve(KvLayout(sequences=1, cells=256, unified=True))
    return llama


def logits_in(llama: LlamaContext, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits [len(ids), vocabulary] of a text, with the adapter that is set in `llama`."""
    llama.clear()
    tokens = np.array(ids, np.int32)
    together = int(len(ids) * _TOGETHER)
    rows = []
    for begin in range(0, together, _PIECE):
        rows.append(llama.feed_scored(tokens[begin : min(begin + _PIECE, together)], begin).copy())
    for position in range(together, len(ids)):
        rows.append(llama.feed_rows(tokens[position : position + 1], np.array([position], np.int32)).copy())
    return np.concatenate(rows)


def logits_of(gguf: Path, ids: list[int], adapter: Path | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits [len(ids), vocabulary] of a text under the GGUF model, with or without an adapter."""
    llama = open_model(gguf)
    llama.set_adapter(None if adapter is None else llama.load_adapter(adapter))
    logits = logits_in(llama, ids)
    llama.close()
    return logits
