"""A causal LM of mlx-lm with one row per rollout. Rows share one array of keys and have separate positions.

A prompt is prefilled once; its keys and values are copied into the rows of its rollouts. Rows 0 .. n-1 are in use. A
mask hides everything beyond a row's position, so rows start, move and end without touching the others. MLX ties arrays
to threads: the thread that called `open` must make all calls except `read_policy`.

Dimensions: R rows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from echo_node.backends.base import unsupported_model, weights_of
from echo_node.backends.scoring import pieces
from echo_shared.delta.adapter import PROJECTIONS, Adapter, load_adapter
from echo_shared.errors import BackendError

_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
_DTYPES: Final = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
_BITS: Final = {"q8_0": 8, "q4_0": 4}
"""Bits of MLX's affine quantization; its block length is that of llama.cpp's types of these names. Values other than
the weights are float32: 16-bit activations would add more error than 8-bit weights.
"""
_BLOCK: Final = 32
_F32_MODEL_BYTES: Final = 256 * 2**20
"""Models whose float32 weights take fewer bytes run in float32, so that they compute exactly."""
_LENGTH_STEP: Final = 256
_PREFILL_TOKENS: Final = 2_048
"""Maximum tokens fed in one call. It bounds the memory of a long prompt's attention."""
_BUFFER_CACHE_BYTES: Final = 512 * 2**20
"""Freed memory that MLX may keep for new arrays, whose sizes change a little with each step."""

Prompt = list[tuple[mx.array, mx.array]]
"""Keys and values [1, heads, tokens, head size] of each layer. Empty for a prompt of one token."""


@dataclass(slots=True)
class MlxPolicy:
    """See `base.PreparedPolicy`. An adapter in host memory that fits the model."""

    adapter: Adapter | None

    def free(self) -> None:
        self.adapter = None


class MlxModel:
    """The model, and the keys and values of its rows.

    Call `open`, then `set_policy`, then the methods for prompts and rows.
    """

    def open(self, base_dir: Path, *, device: str, precision: str) -> None:
        """Load the model. Raises BackendError if MLX lacks the device or the precision, or cannot run the model."""
        try:
            mx.set_default_device(mx.Device(mx.cpu if device == "cpu" else mx.gpu))
            mx.set_cache_limit(_BUFFER_CACHE_BYTES)
            self.precision = _resolve(base_dir, precision)
            self._model, config = _load(base_dir, self.precision)
            self.vocab_size = int(config["vocab_size"])
            self.max_positions = int(config["max_position_embeddings"])
            self._window = _Window()
            self._layers = [_Layer(cache, self._window) for cache in self._probe()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackendError("MLX could not load the base model.", got=f"{base_dir}: {error}") from error
        self._adapted = _adapt(self._model)

    def _probe(self) -> list[Any]:
        """Return the caches of all layers after one token. They show the shapes of keys and values."""
        caches: list[Any] = make_prompt_cache(self._model)
        if any(type(cache) is not KVCache for cache in caches):
            raise unsupported_model("layers that do not keep the keys and values of every token")
        mx.eval(self._model(mx.zeros((1, 1), mx.int32), cache=caches))
        return caches

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self._layers)

    def read_policy(self, adapter_dir: Path) -> MlxPolicy:
        """Read an adapter, on any thread. Raises CodecError, and BackendError if the adapter does not fit the model."""
        adapter = load_adapter(adapter_dir)
        for module in adapter.modules:
            layer = self._adapted.get(module.path)
            if layer is None or layer.shape != (len(module.b), module.a.shape[1]):
                raise BackendError("An adapter changes a layer that the base model does not have.", got=module.path)
        return MlxPolicy(adapter)

    def set_policy(self, policy: MlxPolicy | None) -> None:
        updates = {}
        if policy is not None:
            assert policy.adapter is not None, "freed"
            dtype = self._layers[0].keys.dtype
            for module in policy.adapter.modules:
                updates[module.path] = mx.array(module.a.T, dtype), mx.array(module.b.T, dtype)
        mx.eval(updates)
        for path, layer in self._adapted.items():
            layer.update_by = updates.get(path)

    def reserve(self, rows: int, length: int, kept_rows: int) -> None:
        """Reserve `rows` rows of `length` tokens each. The first `kept_rows` rows keep their contents."""
        for layer in self._layers:
            layer.reshape(rows, length, kept_rows)
        mx.eval([layer.stored for layer in self._layers])

    def prefill(self, prompts: Sequence[NDArray[np.int32]]) -> list[Prompt]:
        """Return the keys and values of each prompt [tokens], without its last token, which `step` feeds."""
        computed: list[Prompt] = [[] for _ in prompts]
        for batch in _batches(prompts):
            lengths = [len(prompts[number]) - 1 for number in batch]
            # Pad on the right: no token attends to later ones, so the padding needs no mask.
            ids = np.zeros((len(batch), lengths[-1]), np.int32)
            for row, number in enumerate(batch):
                ids[row, : lengths[row]] = prompts[number][:-1]
            caches = [KVCache() for _ in self._layers]
            piece = max(1, _PREFILL_TOKENS // len(batch))
            for begin in range(0, lengths[-1], piece):
                self._model(mx.array(ids[:, begin : begin + piece]), cache=caches)
                mx.eval([(cache.keys, cache.values) for cache in caches])
            for row, (number, length) in enumerate(zip(batch, lengths, strict=True)):
                cut = (slice(row, row + 1), slice(None), slice(length))
                computed[number] = [
                    (mx.contiguous(cache.keys[cut]), mx.contiguous(cache.values[cut])) for cache in caches
                ]
            mx.eval([computed[number] for number in batch])
        return computed

    def extend(self, prompt: Prompt, ids: NDArray[np.int32]) -> Prompt:
        """Return the keys and values of `ids` [tokens] without the last one, like `prefill`. `ids` must begin with the
        prompt, whose keys are reused.
        """
        done = prompt[0][0].shape[2] if prompt else 0
        caches = [KVCache() for _ in self._layers]
        for cache, (keys, values) in zip(caches, prompt, strict=False):  # A prompt of one token has no keys.
            cache.keys, cache.values, cache.offset = keys, values, done
        for begin in range(done, len(ids) - 1, _PREFILL_TOKENS):
            piece = ids[begin : min(begin + _PREFILL_TOKENS, len(ids) - 1)]
            self._model(mx.array(piece)[None], cache=caches)
            mx.eval([(cache.keys, cache.values) for cache in caches])
        return [cache.keys_and_values() for cache in caches]

    def logits_before(
        self, ids: NDArray[np.int32], first: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """Yield, in pieces, the tokens from position `first` on [R], and the logits [R, V] from which each is drawn."""
        caches = [KVCache() for _ in self._layers]
        for begin, end, wanted in pieces(len(ids), first, vocab_size=self.vocab_size, most=_PREFILL_TOKENS):
            logits = self._model(mx.array(ids[begin:end])[None], cache=caches)
            if wanted:
                rows = logits[0, -wanted:].astype(mx.float32)
                mx.eval(rows)
                yield np.array(rows, copy=False), ids[end - wanted + 1 : end + 1]
            else:
                mx.eval([(cache.keys, cache.values) for cache in caches])

    def put(self, prompt: Prompt, rows: Sequence[int]) -> None:
        if not prompt:
            return
        targets = mx.array(rows)
        for layer, (keys, values) in zip(self._layers, prompt, strict=True):
            layer.keys[targets, :, : keys.shape[2]] = keys
            layer.values[targets, :, : keys.shape[2]] = values

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        from_rows, to_rows = mx.array(sources), mx.array(targets)
        for layer in self._layers:
            layer.keys[to_rows] = layer.keys[from_rows]
            layer.values[to_rows] = layer.values[from_rows]

    def step(self, tokens_R: NDArray[np.int32], positions_R: NDArray[np.int32]) -> NDArray[np.float32]:
        """Feed the next tokens [R] of rows 0 .. R-1 at their positions [R]. Return the logits after them, [R, V]."""
        self._window.set(positions_R)
        logits = self._model(mx.array(tokens_R)[:, None], cache=self._layers)[:, -1].astype(mx.float32)
        mx.eval(logits)
        return np.array(logits, copy=False)


class _Window:
    """Positions and mask of the next step, shared by all layers."""

    def set(self, positions_R: NDArray[np.int32]) -> None:
        self.rows = mx.arange(len(positions_R))
        self.positions = mx.array(positions_R)
        self.length = int(positions_R.max()) + 1
        self.mask = (mx.arange(self.length) <= self.positions[:, None])[:, None, None]


class _Layer:
    """One layer's keys and values of all rows, with the interface of mlx-lm's caches."""

    def __init__(self, probe: KVCache, window: _Window) -> None:
        self.keys = probe.keys[:0]
        self.values = probe.values[:0]
        self._window = window

    @property
    def bytes_per_token(self) -> int:
        heads, size = self.keys.shape[1], self.keys.shape[3] + self.values.shape[3]
        return int(heads * size * self.keys.dtype.size)

    @property
    def stored(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def reshape(self, rows: int, length: int, kept_rows: int) -> None:
        self.keys = _reshaped(self.keys, rows, length, kept_rows)
        self.values = _reshaped(self.values, rows, length, kept_rows)

    @property
    def offset(self) -> mx.array:
        return self._window.positions

    def make_mask(self, _tokens: int, **_options: Any) -> mx.array:
        return self._window.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        window = self._window
        self.keys[window.rows, :, window.positions] = keys[:, :, 0]
        self.values[window.rows, :, window.positions] = values[:, :, 0]
        count = len(keys)
        return self.keys[:count, :, : window.length], self.values[:count, :, : window.length]


def _reshaped(old: mx.array, rows: int, length: int, kept_rows: int) -> mx.array:
    new = mx.zeros((rows, old.shape[1], length, old.shape[3]), old.dtype)
    if kept_rows:
        kept = min(length, old.shape[2])
        new[:kept_rows, :, :kept] = old[:kept_rows, :, :kept]
    return new


class _AdaptedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer, quantized or not, plus the adapter's product."""

    def __init__(self, linear: Any, shape: tuple[int, int]) -> None:
        super().__init__()
        self.linear = linear
        self.shape = shape
        """(outputs, inputs) of the layer."""
        self.update_by: tuple[mx.array, mx.array] | None = None
        """The adapter's matrices A and B for this layer, transposed; None: no adapter."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if self.update_by is None:
            return y
        a, b = self.update_by
        return y + (x @ a) @ b


def round_up(length: int) -> int:
    """Return the number of tokens to reserve for a row of up to `length` tokens."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _adapt(model: Any) -> dict[str, _AdaptedLinear]:
    """Wrap the layers that adapters may change. Return them by their names in transformers."""
    adapted = {}
    for path, linear in model.named_modules():
        if path.rpartition(".")[2] in PROJECTIONS:
            outputs, inputs = linear.weight.shape
            if isinstance(linear, nn.QuantizedLinear):
                inputs = inputs * 32 // linear.bits  # Quantised weights are packed into 32-bit words.
            adapted[path] = _AdaptedLinear(linear, (outputs, inputs))
    model.update_modules(tree_unflatten(list(adapted.items())))
    return adapted


def _batches(prompts: Sequence[NDArray[np.int32]]) -> Iterator[list[int]]:
    """Yield batches of prompt indices, short prompts first, each of at most `_PREFILL_TOKENS` tokens with padding.

    Prompts of one token are skipped.
    """
    batch: list[int] = []
    for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number])):
        length = len(prompts[number]) - 1
        if length == 0:
            continue
        if batch and (len(batch) + 1) * length > _PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _load(base_dir: Path, precision: str) -> tuple[Any, dict[str, Any]]:
    """Return the model in evaluation mode, computing in `precision`, and its configuration."""
    weights_of(base_dir)
    config = json.loads((base_dir / "config.json").read_bytes())
    if config["model_type"] not in _ARCHITECTURES:
        raise unsupported_model(f"model_type {config['model_type']}")
    if config.get("hidden_act", "silu") != "silu" or config.get("use_sliding_window"):
        raise unsupported_model(f"hidden_act {config.get('hidden_act')}, sliding window")
    # Set these explicitly: some of mlx-lm's classes read an older form of transformers' settings and have other
    # defaults.
    rope = config.get("rope_parameters") or {"rope_type": "default", **(config.get("rope_scaling") or {})}
    rope_type = rope.get("type") or rope["rope_type"]
    if rope_type not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported_model(f"rope_type {rope_type}")
    settings = {
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
        "rope_scaling": None if rope_type == "default" else rope,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    model, config = load_model(base_dir, lazy=True, model_config=settings)
    model.set_dtype(_DTYPES.get(precision, mx.float32))
    if precision in _BITS:
        nn.quantize(model, _BLOCK, _BITS[precision], class_predicate=_is_quantisable)
    mx.eval(model.parameters())
    return model, config


def _is_quantisable(_path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % _BLOCK == 0


def _resolve(base_dir: Path, requested: str) -> str:
    """Return the requested precision. For auto: float32 for small models, 16 bits up to a third of the memory, else 8
    bits.
    """
    if requested in _DTYPES or requested in _BITS:
        return requested
    if requested != "auto":
        raise BackendError(
            "MLX does not have this precision here.",
            got=requested,
            do=f"Use one of auto, {', '.join([*_DTYPES, *_BITS])}.",
        )
    stored_bytes = sum(file.stat().st_size for file in weights_of(base_dir))
    if 2 * stored_bytes <= _F32_MODEL_BYTES:
        return "f32"
    return "bf16" if stored_bytes <= psutil.virtual_memory().total // 3 else "q8_0"
