"""Converts PEFT LoRA to GGUF LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from echo_shared.delta.adapter import Adapter, LoraModule
from echo_shared.errors import BackendError
from echo_shared.gguf.model_file import on_disk
from echo_shared.gguf.shape import ModelShape

Sizes = Mapping[str, tuple[int, ...]]
"""Sizes of the tensors of a model file, as in `GgufSummary`."""


def write_adapter(adapter: Adapter, shape: ModelShape, sizes: Sizes, path: Path) -> None:
    """Write `adapter` as a GGUF LoRA file for the model with this shape and these tensor sizes. Raises BackendError if
    the adapter does not fit the model, and StorageError.
    """
    with on_disk(path), closing(gguf.GGUFWriter(path, shape.architecture)) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        for name, array in _adapter_tensors(adapter, shape, sizes):
            writer.add_tensor(name, array)
        # 0 turns off llama.cpp's scaling by alpha/r: the weights are already scaled.
        writer.add_float32("adapter.lora.alpha", 0.0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _adapter_tensors(adapter: Adapter, shape: ModelShape, sizes: Sizes) -> Iterator[tuple[str, NDArray[np.float32]]]:
    names = gguf.get_tensor_name_map(shape.family.arch, shape.num_layers)
    for module in adapter.modules:
        reason = shape.family.fixed.get(module.path.rpartition(".")[2])
        if reason is not None:
            raise BackendError(
                "An adapter changes a layer that llama.cpp cannot adapt.", got=f"{module.path}: {reason}"
            )
        parts = shape.family.parts(f"{module.path}.weight")
        targets = [names.get_name(part.name, try_suffixes=(".weight",)) or "" for part in parts]
        # llama.cpp would abort the process on an adapter for tied embeddings.
        if not all(target.startswith("blk.") and target in sizes for target in targets):
            raise BackendError("An adapter changes a layer that the base model does not have.", got=module.path)
        if any(part.value is not None for part in parts) or any(len(sizes[target]) != 2 for target in targets):
            raise BackendError("An adapter changes a layer that llama.cpp cannot adapt.", got=module.path)
        _check_size(module, [sizes[target] for target in targets])
        for part, target in zip(parts, targets, strict=True):
            a = module.a if part.columns is None else module.a[:, part.columns]
            b = module.b if part.rows is None else module.b[part.rows]
            yield f"{target}.lora_a", np.ascontiguousarray(a)
            yield f"{target}.lora_b", np.ascontiguousarray(b)


def _check_size(module: LoraModule, sizes: list[tuple[int, ...]]) -> None:
    """Raise BackendError unless the adapter fits the matrices with these sizes: the number of inputs must equal that of
    each matrix, and the number of outputs the sum over all matrices.
    """
    size = module.a.shape[1], module.b.shape[0]
    fitting = sizes[0][0], sum(outputs for _, outputs in sizes)
    if size != fitting:
        raise BackendError(
            "An adapter is for a model of another shape.",
            got=f"{module.path}: {size[0]} to {size[1]} values, not {fitting[0]} to {fitting[1]}",
        )
