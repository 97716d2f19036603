"""Converts Hugging Face safetensors to GGUF, and PEFT LoRA to GGUF LoRA, for llama.cpp.

The model file has no vocabulary: the engine works on token ids. A file is converted once for each directory, precision
and `FORMAT`, and gets its final name only when it is complete. The caller uses one directory per content of the base
model. Tensors are converted one at a time; llama.cpp itself makes K-quants from a 16-bit file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import llama_cpp
import numpy as np
import psutil
from numpy.typing import NDArray

from echo_node.backends.base import unsupported_model, weights_of
from echo_node.backends.llama_cpp_devices import load_devices
from echo_shared.delta.adapter import Adapter
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import BackendError
from echo_shared.files.atomic import disk_error, sync

FORMAT: Final = 1
"""Version of the conversion, part of a file's name. Increase it when the same base model converts to
different bytes.
"""

_ARCHITECTURES: Final = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
}
_TYPES: Final = {
    "f32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
_K_QUANTS: Final = {
    "q3_k_m": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k_m": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": gguf.LlamaFileType.MOSTLY_Q6_K,
}
_Q8_0_BLOCK: Final = 32
_EXACT_BYTES: Final = 256 * 2**20
"""Models whose float32 weights take fewer bytes run in float32, so that they compute exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The part of a model's config.json that llama.cpp needs."""

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

    def in_and_out(self, layer: str) -> tuple[int, int]:
        """Return the columns and rows of the weight matrix of the layer with this path."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size, heads),
            "k_proj": (self.hidden_size, kv_heads),
            "v_proj": (self.hidden_size, kv_heads),
            "o_proj": (heads, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }[layer.rpartition(".")[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """The model file that llama.cpp loads."""

    path: Path
    is_exact: bool
    """True if all weights are float32."""
    precision: str
    """Precision of the weights; empty for a base model that came as a GGUF file in another precision than f32."""
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
        file_type = gguf.GGUFReader(given).get_field("general.file_type")
        is_exact = file_type is not None and file_type.contents() == gguf.LlamaFileType.ALL_F32
        return ModelFile(path=given, is_exact=is_exact, precision="f32" if is_exact else "", is_converted=False)
    read_shape(base_dir)  # Check the shape first: its errors say more than "no weights".
    if precision == "auto":
        precision = _suitable_precision(base_dir, derived_dir, gpu=gpu)
    path = convert_model(base_dir, derived_dir, precision)
    return ModelFile(path=path, is_exact=precision == "f32", precision=precision)


def given_gguf(base_dir: Path) -> Path | None:
    """Return the GGUF file if the base model consists of one, else None."""
    files = list(base_dir.glob("*.gguf"))
    return files[0] if len(files) == 1 and not any(base_dir.glob("*.safetensors")) else None


def _suitable_precision(base_dir: Path, derived_dir: Path, *, gpu: bool) -> str:
    """Return float32 for small models, 16 bits if the weights fit in a third of the memory, else q8_0.

    If only a converted file is left of the weights, return its precision. A CPU that multiplies bfloat16 in hardware
    computes bfloat16 twice as fast as float16.
    """
    if not any(base_dir.glob("*.safetensors")):
        for precision in (*_TYPES, *_K_QUANTS):
            if _converted(base_dir, derived_dir, precision).exists():
                return precision
    stored_bytes = sum(file.stat().st_size for file in weights_of(base_dir))
    if 2 * stored_bytes <= _EXACT_BYTES:
        return "f32"
    if stored_bytes > psutil.virtual_memory().total // 3:
        return "q8_0"
    load_devices()
    return "bf16" if not gpu and b"BF16 = 1" in llama_cpp.llama_print_system_info() else "f16"


def read_shape(base_dir: Path) -> ModelShape:
    """Return the shape of the model in `base_dir`. Raises BackendError if llama.cpp cannot run it here."""
    given = given_gguf(base_dir)
    return _shape_of_config(base_dir) if given is None else _shape_of_gguf(given)


def _shape_of_gguf(path: Path) -> ModelShape:
    try:
        reader = gguf.GGUFReader(path)

        def value(key: str, default: Any = None) -> Any:
            field = reader.get_field(key)
            return default if field is None else field.contents()

        architecture = value("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise unsupported_model(f"a GGUF file of architecture {architecture}")
        embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
        num_heads = value(f"{architecture}.attention.head_count")
        return ModelShape(
            architecture=architecture,
            num_layers=value(f"{architecture}.block_count"),
            hidden_size=int(embedding.shape[0]),
            intermediate_size=value(f"{architecture}.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=value(f"{architecture}.attention.head_count_kv", num_heads),
            head_dim=value(f"{architecture}.attention.key_length", int(embedding.shape[0]) // num_heads),
            vocab_size=int(embedding.shape[1]),
            max_positions=value(f"{architecture}.context_length"),
            norm_eps=value(f"{architecture}.attention.layer_norm_rms_epsilon"),
            rope={},
            tied_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        )
    except (OSError, ValueError, TypeError, KeyError, IndexError, StopIteration) as error:
        raise BackendError("The base model's GGUF file cannot be used.", got=f"{path.name}: {error!r}") from error


def _shape_of_config(base_dir: Path) -> ModelShape:
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
    # Configurations from before transformers 5 store rope base and scaling separately.
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


def convert_model(base_dir: Path, derived_dir: Path, precision: str) -> Path:
    """Return the GGUF file of the model in `base_dir`; convert it first if needed.

    Different base models must have different `derived_dir`s. Raises BackendError, CodecError or StorageError.
    """
    if precision not in _TYPES and precision not in _K_QUANTS:
        raise BackendError(
            "llama.cpp does not have this precision here.",
            got=precision,
            do=f"Use one of auto, {', '.join([*_TYPES, *_K_QUANTS])}.",
        )
    target = _converted(base_dir, derived_dir, precision)
    if target.exists():
        return target
    with _on_disk(target), _temporary(target) as temporary:
        derived_dir.mkdir(parents=True, exist_ok=True)
        if precision in _TYPES:
            _write_model(temporary, base_dir, precision)
        else:
            _write_k_quant(temporary, base_dir, precision)
        sync(temporary)
        temporary.replace(target)
        sync(derived_dir)
    return target


def _converted(base_dir: Path, derived_dir: Path, precision: str) -> Path:
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
def _on_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(
            "A model cannot be converted for llama.cpp.", path.parent, got=str(error), code=error.errno
        ) from error


def _write_k_quant(path: Path, base_dir: Path, precision: str) -> None:
    with _temporary(path, "f16") as whole:
        _write_model(whole, base_dir, "f16")
        _check_room(path, whole.stat().st_size // 2)
        load_devices()
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _K_QUANTS[precision]
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), ctypes.byref(params)) != 0:
            raise BackendError("llama.cpp could not quantise the base model.", got=precision)


def _check_room(path: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes / 2**20:.0f} MiB needed, {free_bytes / 2**20:.0f} MiB free")


def _write_model(path: Path, base_dir: Path, precision: str) -> None:
    shape = read_shape(base_dir)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[shape.architecture], shape.num_layers)
    files = [TensorFile(file) for file in weights_of(base_dir)]
    sources = [(file, name) for file in files for name in sorted(file) if not _is_left_out(name, shape)]
    if not sources:
        raise BackendError("The base model has no weights.", got=f"no tensor in {base_dir}")
    with closing(gguf.GGUFWriter(path, shape.architecture)) as writer:
        _add_metadata(writer, shape, precision)
        kinds = []
        total_bytes = 0
        for file, name in sources:
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise unsupported_model(f"a tensor named {name}")
            dims = file.shape(name)
            kinds.append(_kind(dims, precision))
            nbytes = math.prod(gguf.quant_shape_to_byte_shape(dims, kinds[-1]))
            total_bytes += nbytes
            writer.add_tensor_info(target, dims, np.dtype(np.float32), nbytes, raw_dtype=kinds[-1])
        freqs = _rope_freqs(shape)
        if freqs is not None:
            writer.add_tensor_info("rope_freqs.weight", freqs.shape, freqs.dtype, freqs.nbytes)
        _check_room(path, total_bytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (file, name), kind in zip(sources, kinds, strict=True):
            writer.write_tensor_data(gguf.quants.quantize(_rows_in_order(name, file[name], shape), kind))
        if freqs is not None:
            writer.write_tensor_data(freqs)


def _is_left_out(name: str, shape: ModelShape) -> bool:
    # Without an output matrix, llama.cpp uses the embedding for the output.
    return name.endswith("rotary_emb.inv_freq") or (shape.tied_embeddings and name == "lm_head.weight")


def _kind(dims: tuple[int, ...], precision: str) -> gguf.GGMLQuantizationType:
    if len(dims) < 2:
        return gguf.GGMLQuantizationType.F32
    if precision == "q8_0" and dims[-1] % _Q8_0_BLOCK:
        return gguf.GGMLQuantizationType.F16
    return _TYPES[precision][1]


def _rows_in_order(name: str, array: NDArray[np.float32], shape: ModelShape) -> NDArray[np.float32]:
    """Reorder the rows of q and k: llama.cpp's Llama rotates adjacent pairs of values, transformers rotates halves."""
    num_heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if shape.architecture != "llama" or num_heads is None:
        return array
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _add_metadata(writer: gguf.GGUFWriter, shape: ModelShape, precision: str) -> None:
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
    writer.add_file_type(_TYPES[precision][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("none")
    if shape.rope["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(shape.rope["rope_type"]))
        writer.add_rope_scaling_factor(shape.rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(shape.rope["original_max_position_embeddings"])


def _rope_freqs(shape: ModelShape) -> NDArray[np.float32] | None:
    """Return Llama 3's divisors of the rotary frequencies, as in transformers.modeling_rope_utils ("llama3"); else
    None.
    """
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
    """Write `adapter` as a GGUF LoRA file. Raises BackendError if it does not fit a model of `shape`, and
    StorageError.
    """
    with _on_disk(path), closing(gguf.GGUFWriter(path, shape.architecture)) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        for name, array in _adapter_tensors(adapter, shape):
            writer.add_tensor(name, array)
        # 0 turns off llama.cpp's scaling by alpha/r: the weights are already scaled.
        writer.add_float32("adapter.lora.alpha", 0.0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _adapter_tensors(adapter: Adapter, shape: ModelShape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    names = gguf.get_tensor_name_map(_ARCHITECTURES[shape.architecture], shape.num_layers)
    for module in adapter.modules:
        target = names.get_name(module.path)
        # llama.cpp would abort the process on an adapter for tied embeddings.
        if target is None or not target.startswith("blk."):
            raise BackendError("An adapter changes a layer that the base model does not have.", got=module.path)
        size = module.a.shape[1], module.b.shape[0]
        fitting = shape.in_and_out(module.path)
        if size != fitting:
            raise BackendError(
                "An adapter is for a model of another shape.",
                got=f"{module.path}: {size[0]} to {size[1]} values, not {fitting[0]} to {fitting[1]}",
            )
        b = _rows_in_order(f"{module.path}.weight", module.b, shape)
        yield f"{target}.weight.lora_a", np.ascontiguousarray(module.a)
        yield f"{target}.weight.lora_b", np.ascontiguousarray(b)
