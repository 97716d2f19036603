"""Check that a GGUF file contains the base model, in any precision of the weights.

Architecture, tensors and shapes must equal those of a conversion by Echo (`echo_shared.gguf.tensor_plan`). So must the
metadata by which llama.cpp computes: published files of one model differ in their rotary embeddings, with which a
context is extended. Sampled weights must resemble those of the base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from echo_shared.delta.base_weights import weights_of
from echo_shared.errors import BackendError, ConfigError
from echo_shared.gguf.opened_model import OpenedModel
from echo_shared.gguf.shape import ModelShape, read_shape
from echo_shared.gguf.tensor_plan import BaseWeights, PlannedTensor, plan

MOST_UNLIKE: Final = 0.5
"""Largest distance between a weight matrix of the file and that of the base, as a share of the base's norm. 2-bit
weights have a distance of about a third; weights of another model have more than 1."""
COMPARED: Final = ("attn_output.weight", "ffn_down.weight", "attn_q.weight")
"""Weight matrices that are compared with the base model's, in the first and the last block."""

_COMPUTES: Final = re.compile(
    r"\w+\.(rope\.(dimension_count|freq_base|freq_base_swa)|attention\.(layer_norm(_rms)?_epsilon|scale|sliding_window)"
    r"|\w+_logit_softcapping|(logit|residual|embedding|expert_weights)_scale|expert_used_count)"
)
"""Keys of metadata that change what llama.cpp computes, and that no tensor's shape shows. Converters may omit them."""
_FACTORS: Final = re.compile(r"rope_(freqs|factors_\w+)\.weight")
_USUAL_BASE: Final = 10_000.0
"""llama.cpp's rope.freq_base for a file without this key."""
_NEAR: Final = 1e-4
"""Relative difference up to which two numbers count as equal: the file stores numbers in float32."""


def check_fits(file: OpenedModel, base_dir: Path) -> None:
    """Raise ConfigError unless the GGUF file has the architecture, the shapes and the weights of the base model in
    `base_dir`, and Echo can run that model with llama.cpp.
    """
    try:
        shape = read_shape(base_dir)
        weights = BaseWeights(weights_of(base_dir))
        planned = plan(weights, shape, "f32")
    except BackendError as error:
        raise ConfigError(
            "Nodes cannot run this base model with llama.cpp.",
            got=f"{error.what} {error.got or ''}".rstrip(),
            do="Remove model.gguf.",
        ) from error
    if file.architecture != shape.architecture:
        raise _unfit(file, f"architecture {file.architecture!r}, and the base model {shape.architecture!r}")
    layers = int(file.value("{arch}.block_count") or 0)
    if layers != shape.num_layers:
        raise _unfit(file, f"{layers} layers, and the base model {shape.num_layers}")
    _check_metadata(file, shape)
    for tensor in planned:
        if tensor.name not in file.tensors:
            raise _unfit(file, f"no tensor {tensor.name}, which the base model has")
        # One of the two shapes may have additional dimensions of size 1.
        if math.prod(tensor.shape) != math.prod(file.shape(tensor.name)):
            sizes = ["x".join(map(str, one)) for one in (file.shape(tensor.name), tensor.shape)]
            raise _unfit(file, f"{tensor.name} of {sizes[0]} values, and the base model of {sizes[1]}")
    for tensor in _compared(planned):
        base_OI, given_OI = tensor.data(weights), file.rows(tensor.name, tensor.shape[0])
        off = float(np.linalg.norm(given_OI - base_OI)) / max(float(np.linalg.norm(base_OI)), 1e-30)
        if not off <= MOST_UNLIKE:
            raise _unfit(file, f"{tensor.name}, which is off by {off:.0%} of the base model's weights")


def _check_metadata(file: OpenedModel, shape: ModelShape) -> None:
    writer = gguf.GGUFWriter("", shape.architecture)
    shape.family.add_metadata(writer)
    shape.family.add_more(writer)
    of_base = {key: entry.value for key, entry in writer.kv_data[0].items()}
    for key in sorted(filter(_COMPUTES.fullmatch, of_base)):
        found = file.value(key)
        if found is None and key.endswith("rope.freq_base"):
            found = _USUAL_BASE
        if found is not None and not _is_same(found, of_base[key]):
            raise _unfit(file, f"{key} {found}, and the base model {of_base[key]}")
    scaling_keys = [f"{shape.architecture}.rope.scaling.{name}" for name in ("type", "factor")]
    scaled, wanted = _scaling(*map(file.value, scaling_keys)), _scaling(*map(of_base.get, scaling_keys))
    if scaled[0] != wanted[0] or not _is_same(scaled[1], wanted[1]):
        both = [f"{'YaRN' if is_yarn else 'scaling'} by {factor:g}" for is_yarn, factor in (scaled, wanted)]
        raise _unfit(file, f"rotary embeddings with {both[0]}, and the base model with {both[1]}")
    factors = shape.family.rope.factors()
    for name in sorted(factors.keys() | set(filter(_FACTORS.fullmatch, file.tensors))):
        if name not in factors or name not in file.tensors:
            raise _unfit(file, f"{'a' if name in file.tensors else 'no'} tensor {name}, unlike the base model")
        if not _is_same(file.rows(name, len(factors[name])), factors[name]):
            raise _unfit(file, f"other values in {name} than the base model")


def _scaling(kind: Any, factor: Any) -> tuple[bool, float]:
    """Return True for YaRN, and the factor that extends the context, as llama.cpp reads these two entries of the
    metadata. None: the entry is missing.
    """
    return kind == "yarn", 1.0 if kind == "none" else float(factor or 1.0)


def _is_same(found: Any, wanted: Any) -> bool:
    try:
        return bool(np.allclose(found, wanted, rtol=_NEAR, atol=0.0))
    except (TypeError, ValueError):
        return False


def _compared(planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    found = []
    for name in COMPARED:
        of_layers = [tensor for tensor in planned if tensor.name.endswith(name) and len(tensor.shape) == 2]
        found += [*of_layers[:1], *of_layers[1:][-1:]]
    return found


def _unfit(file: OpenedModel, got: str) -> ConfigError:
    return ConfigError(
        "The GGUF file for llama.cpp is not the base model.",
        got=f"{file.parts[0].name} has {got}",
        do='Set model.gguf to a GGUF file that was made from model.base, or to "none".',
    )
