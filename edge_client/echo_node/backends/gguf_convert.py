"""Hugging Face safetensors to GGUF, and PEFT LoRA to GGUF LoRA: what llama.cpp loads.

The model file is vocabulary-free: token ids go in and come out, text is the hub's business. It is derived once for each
directory, precision and `FORMAT`, and moved into place when it is whole; the caller's directory stands for the content
of the base. Tensors are converted one at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from echo_node.backends.base import unsupported_model
from echo_shared.adapter import Adapter
from echo_shared.errors import BackendError, StorageError
from echo_shared.tensors import TensorFile

Precision = Literal["f32", "f16", "q8_0"]

FORMAT: Final = 1
"""Rises when the same artefact converts to different bytes."""

_ARCHITECTURES: Final = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
}
_FILE_TYPES: Final = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_TYPES: Final = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_Q8_0_BLOCK: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a config.json says of the model, as far as llama.cpp must know it."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: dict[str, Any]
    tied_embeddings: bool

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache holds for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_shape(base_dir: Path) -> ModelShape:
    """The shape of the model in `base_dir`. Raises BackendError when this backend cannot run it."""
    try:
        config = json.loads((base_dir / "config.json").read_bytes())
        architecture = config["model_type"]
        if architecture not in _ARCHITECTURES:
            raise unsupported_model(f"model_type {architecture}")
        if config.get("hidden_act", "silu") != "silu" or config.get("use_sliding_window"):
            raise unsupported_model(f"hidden_act {config.get('hidden_act')}, sliding window")
        num_heads = config["num_attention_heads"]
        return ModelShape(
            architecture=architecture,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope=_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError("The base model's config.json cannot be used.", got=f"{error!r}") from error


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # Configurations written before transformers 5 keep the base and the scaling apart.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if (
        rope["rope_type"] not in {"default", "linear", "llama3", "yarn"}
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        raise unsupported_model(f"rope_type {rope['rope_type']}")
    return rope


def convert_model(base_dir: Path, derived_dir: Path, precision: Precision) -> Path:
    """The GGUF of the model in `base_dir`, made if it is not there. Raises BackendError, CodecError or StorageError.

    `derived_dir` must be another one for a base with other files.
    """
    target = derived_dir / f"{base_dir.name}-{precision}-{FORMAT}.gguf"
    if target.exists():
        return target
    shape = read_shape(base_dir)
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    with _on_disk(target):
        derived_dir.mkdir(parents=True, exist_ok=True)
        try:
            with closing(gguf.GGUFWriter(temporary, shape.architecture)) as writer:
                _write_model(writer, base_dir, shape, precision)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    """The disk's refusals as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            "A model cannot be converted for llama.cpp.",
            got=str(error),
            do=f"Check that {path.parent} is writable, and that its disk has room for the model once more.",
        ) from error


def _write_model(writer: gguf.GGUFWriter, base_dir: Path, shape: ModelShape, precision: Precision) -> None:
    _add_metadata(writer, shape, precision)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[shape.architecture], shape.num_layers)
    files = [TensorFile(file) for file in sorted(base_dir.glob("*.safetensors"))]
    sources = [(file, name) for file in files for name in sorted(file) if not _is_left_out(name, shape)]
    if not sources:
        raise BackendError("The base model has no weights.", got=f"no *.safetensors in {base_dir}")
    kinds = []
    for file, name in sources:
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise unsupported_model(f"a tensor named {name}")
        dims = file.shape(name)
        kind = _kind(dims, precision)
        kinds.append(kind)
        nbytes = math.prod(gguf.quant_shape_to_byte_shape(dims, kind))
        writer.add_tensor_info(target, dims, np.dtype(np.float32), nbytes, raw_dtype=kind)
    freqs = _rope_freqs(shape)
    if freqs is not None:
        writer.add_tensor_info("rope_freqs.weight", freqs.shape, freqs.dtype, freqs.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (file, name), kind in zip(sources, kinds, strict=True):
        writer.write_tensor_data(gguf.quants.quantize(_rows_in_order(name, file[name], shape), kind))
    if freqs is not None:
        writer.write_tensor_data(freqs)


def _is_left_out(name: str, shape: ModelShape) -> bool:
    # llama.cpp reads the embedding a second time when there is no output matrix.
    return name.endswith("rotary_emb.inv_freq") or (shape.tied_embeddings and name == "lm_head.weight")


def _kind(dims: tuple[int, ...], precision: Precision) -> gguf.GGMLQuantizationType:
    if len(dims) < 2:
        return gguf.GGMLQuantizationType.F32
    if precision == "q8_0" and dims[-1] % _Q8_0_BLOCK:
        return gguf.GGMLQuantizationType.F16
    return _TYPES[precision]


def _rows_in_order(name: str, array: NDArray[np.float32], shape: ModelShape) -> NDArray[np.float32]:
    """llama.cpp's Llama rotates neighbouring pairs where transformers rotates halves, so q and k change row order."""
    num_heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if shape.architecture != "llama" or num_heads is None:
        return array
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _add_metadata(writer: gguf.GGUFWriter, shape: ModelShape, precision: Precision) -> None:
    writer.add_type("model")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope["rope_theta"])
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(_FILE_TYPES[precision])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("none")
    if shape.rope["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(shape.rope["rope_type"]))
        writer.add_rope_scaling_factor(shape.rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(shape.rope["original_max_position_embeddings"])


def _rope_freqs(shape: ModelShape) -> NDArray[np.float32] | None:
    """Llama 3's divisors of the rotary frequencies (transformers.modeling_rope_utils, "llama3")."""
    rope = shape.rope
    if rope["rope_type"] != "llama3":
        return None
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    wavelengths = 2 * np.pi * rope["rope_theta"] ** exponents
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float32] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors


def write_adapter(adapter: Adapter, shape: ModelShape, path: Path) -> None:
    """Writes `adapter` as a GGUF LoRA file. Raises BackendError when it is not for a model of `shape`; StorageError."""
    with _on_disk(path), closing(gguf.GGUFWriter(path, shape.architecture)) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        for name, array in _adapter_tensors(adapter, shape):
            writer.add_tensor(name, array)
        # llama.cpp would scale by alpha/r; 0 says that there is nothing left to scale.
        writer.add_float32("adapter.lora.alpha", 0.0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _adapter_tensors(adapter: Adapter, shape: ModelShape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    names = gguf.get_tensor_name_map(_ARCHITECTURES[shape.architecture], shape.num_layers)
    for module in adapter.modules:
        target = names.get_name(module.path)
        if target is None:
            raise BackendError("An adapter changes a layer that the base model does not have.", got=module.path)
        b = _rows_in_order(f"{module.path}.weight", module.b, shape)
        yield f"{target}.weight.lora_a", np.ascontiguousarray(module.a)
        yield f"{target}.weight.lora_b", np.ascontiguousarray(b)
