"""Converts Hugging Face safetensors to GGUF for llama.cpp.

The model file has no vocabulary: the engine works on token ids. A file is converted once for each directory, precision
and `FORMAT`, and gets its final name only when it is complete. The caller uses one directory per content of the base
model. Tensors are converted one at a time; llama.cpp itself makes K-quants from a 16-bit file.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from echo_shared.delta.base_weights import weights_of
from echo_shared.errors import BackendError
from echo_shared.files.atomic import disk_error, sync
from echo_shared.gguf.precisions import FILE_TYPES, PRECISIONS
from echo_shared.gguf.shape import ModelShape, read_shape
from echo_shared.gguf.tensor_plan import BaseWeights, plan

FORMAT: Final = 1
"""Version of the conversion, part of a file's name. Increase it when the same base model converts to
different bytes.
"""


def convert_model(base_dir: Path, derived_dir: Path, precision: str) -> Path:
    """Return the GGUF file of the model in `base_dir`; convert it first if needed.

    Different base models must have different `derived_dir`s. Raises BackendError, CodecError or StorageError.
    """
    if precision not in PRECISIONS:
        raise BackendError(
            "llama.cpp does not have this precision here.",
            got=precision,
            do=f"Use one of auto, {', '.join(PRECISIONS)}.",
        )
    target = converted_path(base_dir, derived_dir, precision)
    if target.exists():
        return target
    with on_disk(target), _temporary(target) as temporary:
        derived_dir.mkdir(parents=True, exist_ok=True)
        if precision in FILE_TYPES:
            _write_model(temporary, base_dir, precision)
        else:
            _write_k_quant(temporary, base_dir, precision)
        sync(temporary)
        temporary.replace(target)
        sync(derived_dir)
    return target


def converted_path(base_dir: Path, derived_dir: Path, precision: str) -> Path:
    """Return the path of the GGUF file that `convert_model` makes for these arguments."""
    return derived_dir / f"{base_dir.name}-{precision}-{FORMAT}.gguf"


@contextmanager
def _temporary(target: Path, suffix: str = "tmp") -> Iterator[Path]:
    """Yield a temporary file next to the target, and delete it at the end.

    Temporary files of killed processes are deleted too.
    """
    for left in target.parent.glob(f"*.{suffix}"):
        left.unlink(missing_ok=True)
    path = target.with_suffix(f".{os.getpid()}.{suffix}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Raise StorageError in place of an OSError while `path` is written."""
    try:
        yield
    except OSError as error:
        raise disk_error(
            "A model cannot be converted for llama.cpp.", path.parent, got=str(error), code=error.errno
        ) from error


def _write_k_quant(path: Path, base_dir: Path, precision: str) -> None:
    # Import this module only here: it needs llama.cpp, which the other precisions do not.
    from echo_shared.gguf.quantising import quantise

    with _temporary(path, "f16") as whole:
        _write_model(whole, base_dir, "f16")
        _check_room(path, whole.stat().st_size // 2)
        quantise(whole, path, precision)


def _check_room(path: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes / 2**20:.0f} MiB needed, {free_bytes / 2**20:.0f} MiB free")


def _write_model(path: Path, base_dir: Path, precision: str) -> None:
    shape = read_shape(base_dir)
    weights = BaseWeights(weights_of(base_dir))
    tensors = plan(weights, shape, precision)
    factors = shape.family.rope.factors()
    with closing(gguf.GGUFWriter(path, shape.architecture)) as writer:
        _add_metadata(writer, shape, precision)
        total_bytes = 0
        for tensor in tensors:
            nbytes = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
            total_bytes += nbytes
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=tensor.kind)
        for name, divisors in factors.items():
            writer.add_tensor_info(name, divisors.shape, divisors.dtype, divisors.nbytes)
        _check_room(path, total_bytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data(weights))
        for divisors in factors.values():
            writer.write_tensor_data(divisors)


def _add_metadata(writer: gguf.GGUFWriter, shape: ModelShape, precision: str) -> None:
    writer.add_type("model")
    shape.family.add_metadata(writer)
    writer.add_file_type(FILE_TYPES[precision][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("none")
    shape.family.add_more(writer)
