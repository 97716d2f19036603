"""Selects the GGUF file that llama.cpp loads for a base model: the given file, or one converted for this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import llama_cpp
import psutil

from echo_shared.delta.base_weights import weights_of
from echo_shared.errors import BackendError
from echo_shared.gguf.llama_cpp_devices import load_devices
from echo_shared.gguf.model_file import convert_model, converted_path
from echo_shared.gguf.opened_model import OpenedModel
from echo_shared.gguf.precisions import PRECISIONS
from echo_shared.gguf.shape import given_gguf, read_shape

_EXACT_BYTES: Final = 256 * 2**20
"""Models whose float32 weights take fewer bytes run in float32, so that they compute exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """The model file that llama.cpp loads."""

    path: Path
    is_exact: bool
    """True if all weights are float32."""
    precision: str
    """Precision of the weights."""
    is_converted: bool = True
    """False if the base model came as this GGUF file."""


def find_model(base_dir: Path, derived_dir: Path, precision: str, *, gpu: bool) -> ModelFile:
    """Return the model in `base_dir` at this precision, converted if necessary. A given GGUF file is used unchanged.

    Raises BackendError, CodecError or StorageError.
    """
    given = given_gguf(base_dir)
    if given is not None:
        if precision != "auto":
            raise BackendError(
                "The precision of a base model in a GGUF file cannot be changed.",
                got=f"precision {precision} for {given.name}",
                do="Set the precision to auto.",
            )
        best = "f16" if read_shape(base_dir).family.rounds_activations else "f32"
        weights = OpenedModel(given).weights
        is_exact = weights == "f32"
        return ModelFile(path=given, is_exact=is_exact, precision=best if is_exact else weights, is_converted=False)
    rounds_activations = read_shape(base_dir).family.rounds_activations
    if precision == "auto":
        precision = _suitable_precision(base_dir, derived_dir, gpu=gpu, may_be_exact=not rounds_activations)
    elif precision == "f32" and rounds_activations:
        raise BackendError(
            "llama.cpp computes the activations of this model in 16 bits.",
            got="precision f32",
            do="Set the precision to auto or f16, so that the hub expects results of 16 bits.",
        )
    path = convert_model(base_dir, derived_dir, precision)
    return ModelFile(path=path, is_exact=precision == "f32", precision=precision)


def _suitable_precision(base_dir: Path, derived_dir: Path, *, gpu: bool, may_be_exact: bool) -> str:
    """Return the precision for this machine: float32 for small models if `may_be_exact`, 16 bits if such weights fit
    into a third of the memory, else q8_0.

    If only a converted file is left of the weights, return its precision. A CPU that multiplies bfloat16 in hardware
    computes bfloat16 twice as fast as float16.
    """
    if not any(base_dir.glob("*.safetensors")):
        for precision in PRECISIONS:
            if converted_path(base_dir, derived_dir, precision).exists():
                return precision
    stored_bytes = sum(file.stat().st_size for file in weights_of(base_dir))
    if may_be_exact and 2 * stored_bytes <= _EXACT_BYTES:
        return "f32"
    if stored_bytes > psutil.virtual_memory().total // 3:
        return "q8_0"
    load_devices()
    return "bf16" if not gpu and b"BF16 = 1" in llama_cpp.llama_print_system_info() else "f16"
