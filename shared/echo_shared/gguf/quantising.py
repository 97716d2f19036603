"""Conversion of a 16-bit GGUF file to K-quants (about 3 to 6 bits per weight), done by llama.cpp itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp

from echo_shared.errors import BackendError
from echo_shared.gguf.llama_cpp_devices import load_devices
from echo_shared.gguf.precisions import K_QUANTS


def quantise(source: Path, target: Path, precision: str) -> None:
    """Write the 16-bit model `source` to `target` in a precision of K_QUANTS. Raises BackendError."""
    load_devices()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = K_QUANTS[precision]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise BackendError("llama.cpp could not quantise the base model.", got=precision)
