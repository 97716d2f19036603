"""A causal LM of mlx-lm with one row per rollout, see `mlx_rows`. `mlx_families` says which models it computes right.

A prompt is prefilled once; its keys, values and states are copied into the rows of its rollouts. Rows 0 .. n-1 are in
use. MLX ties arrays to threads: the thread that called `open` must make all calls except `read_policy`.

Dimensions: R rows, V vocabulary.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from echo_node.backends.mlx_adapters import AdaptedLayers
from echo_node.backends.mlx_families import MlxForm, read_form
from echo_node.backends.mlx_rows import Arrays, KeyRows, OwnMask, Rows, StateRows, Step, kept, of_row, rows_like
from echo_node.backends.scoring import pieces
from echo_shared.delta.adapter import Adapter, load_adapter
from echo_shared.delta.base_weights import unsupported_model, weights_of
from echo_shared.errors import BackendError

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


@dataclass(slots=True)
class Prompt:
    """Arrays that the layers keep of a computed prompt. The prompt's last token is not computed."""

    length: int = 0
    """Number of tokens."""
    layers: list[Arrays] = field(default_factory=list)
    """Arrays of each layer. Empty if the prompt has one token, so that none was computed."""


@dataclass(slots=True)
class MlxPolicy:
    """An adapter in host memory that fits the model (see `base.PreparedPolicy`)."""

    adapter: Adapter | None

    def free(self) -> None:
        self.adapter = None


class MlxModel:
    """The model, and the keys, values and states of its rows.

    Call `open`, then `set_policy`, then the methods for prompts and rows.
    """

    def open(self, base_dir: Path, *, device: str, precision: str) -> None:
        """Load the model. Raises BackendError if MLX lacks the device or the precision, or cannot run the model."""
        try:
            mx.set_default_device(mx.Device(mx.cpu if device == "cpu" else mx.gpu))
            mx.set_cache_limit(_BUFFER_CACHE_BYTES)
            self.precision = _resolve(base_dir, precision)
            self._dtype = _DTYPES.get(self.precision, mx.float32)
            self._model, form = _load(base_dir, self.precision)
            self._check_experts(device)
            self.vocab_size, self.max_positions = form.vocab_size, form.max_positions
            self._adapted = AdaptedLayers(self._model, form.family)
            self._step = Step()
            self._layers = self._rows(form)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackendError("MLX could not load the base model.", got=f"{base_dir}: {error}") from error
        self._pads = not any(isinstance(layer, StateRows) for layer in self._layers)
        """True if prompts of different lengths may share a batch: padding would change a recurrent layer's state."""

    def _check_experts(self, device: str) -> None:
        experts = any(isinstance(module, SwitchLinear) for module in self._model.modules())
        if experts and device == "cpu" and self._dtype != mx.float32:
            raise BackendError(
                "On processors, MLX computes a mixture of experts only in f32, q8_0 and q4_0.",
                got=self.precision,
                do="Choose one of these precisions.",
            )

    def _rows(self, form: MlxForm) -> list[Rows]:
        """Return empty rows for all layers. First feed one token, to learn the shapes of keys, values and states."""
        probes: list[Any] = make_prompt_cache(self._model)
        mx.eval(self._model(mx.zeros((1, 1), mx.int32), cache=probes))
        grouped = form.family.grouped_masks and form.heads_share_keys
        # If a class of mlx-lm supports sliding windows, its cache for such a layer has the window's size. The other
        # layers attend to all tokens.
        known = tuple(getattr(probe, "max_size", None) for probe in probes)
        if grouped or known != form.windows:
            if any(window is not None for window in known):
                raise unsupported_model(f"sliding windows of {form.windows} tokens; mlx-lm uses {known}")
            body = self._model.model
            body.layers = [OwnMask(layer) for layer in body.layers]
        return rows_like(probes, self._step, form.windows, grouped=grouped)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self._layers)

    def bytes_per_row(self, length: int) -> int:
        """Return the bytes to reserve for a row of `length` tokens."""
        return self.kv_bytes_per_token * length + sum(layer.bytes_per_row for layer in self._layers)

    def read_policy(self, adapter_dir: Path) -> MlxPolicy:
        """Read an adapter, on any thread. Raises CodecError, and BackendError if the adapter does not fit the model."""
        adapter = load_adapter(adapter_dir)
        self._adapted.check(adapter)
        return MlxPolicy(adapter)

    def set_policy(self, policy: MlxPolicy | None) -> None:
        if policy is not None:
            assert policy.adapter is not None, "freed"
        self._adapted.use(None if policy is None else policy.adapter, self._dtype)

    def reserve(self, rows: int, length: int, kept_rows: int) -> None:
        """Reserve `rows` rows of `length` tokens each. The first `kept_rows` rows keep their content."""
        for layer in self._layers:
            layer.reshape(rows, length, kept_rows)
        mx.eval([layer.stored for layer in self._layers])

    def prefill(self, prompts: Sequence[NDArray[np.int32]]) -> list[Prompt]:
        """Compute prompts [tokens], and return what the layers keep of each, without its last token, which `step`
        feeds.
        """
        computed = [Prompt() for _ in prompts]
        for batch in _batches(prompts, alike=not self._pads):
            lengths = [len(prompts[number]) - 1 for number in batch]
            # Pad prompts on the right: no token attends to later ones, so the padding needs no mask.
            ids = np.zeros((len(batch), lengths[-1]), np.int32)
            for row, number in enumerate(batch):
                ids[row, : lengths[row]] = prompts[number][:-1]
            caches = [layer.for_prompts() for layer in self._layers]
            piece = max(1, _PREFILL_TOKENS // len(batch))
            for begin in range(0, lengths[-1], piece):
                self._model(mx.array(ids[:, begin : begin + piece]), cache=caches)
                mx.eval([kept(cache) for cache in caches])
            for row, (number, length) in enumerate(zip(batch, lengths, strict=True)):
                computed[number] = Prompt(length, [of_row(cache, row, length) for cache in caches])
            mx.eval([computed[number].layers for number in batch])
        return computed

    def extend(self, prompt: Prompt, ids: NDArray[np.int32]) -> Prompt:
        """Return what the layers keep of `ids` [tokens] without the last one, like `prefill`. `ids` must begin with the
        prompt, which is not computed again.
        """
        length = len(ids) - 1
        if prompt.length == length:
            return prompt
        parts = prompt.layers or [()] * len(self._layers)
        caches = [layer.for_prompts(part) for layer, part in zip(self._layers, parts, strict=True)]
        for begin in range(prompt.length, length, _PREFILL_TOKENS):
            self._model(mx.array(ids[begin : min(begin + _PREFILL_TOKENS, length)])[None], cache=caches)
            mx.eval([kept(cache) for cache in caches])
        return Prompt(length, [of_row(cache, 0, length) for cache in caches])

    def logits_before(
        self, ids: NDArray[np.int32], first: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """Yield pieces of `ids` from position `first` on: (logits [R, V], the tokens [R] that were drawn from them)."""
        caches = [layer.for_prompts() for layer in self._layers]
        for begin, end, wanted in pieces(len(ids), first, vocab_size=self.vocab_size, most=_PREFILL_TOKENS):
            logits = self._model(mx.array(ids[begin:end])[None], cache=caches)
            if wanted:
                rows = logits[0, -wanted:].astype(mx.float32)
                mx.eval(rows)
                yield np.array(rows, copy=False), ids[end - wanted + 1 : end + 1]
            else:
                mx.eval([kept(cache) for cache in caches])

    @property
    def cuts(self) -> bool:
        """True if all layers keep every token, so that the first part of a prompt can be used alone."""
        return self._pads

    def take(self, row: int, length: int) -> Prompt:
        """Return a copy of what the layers keep of the first `length` tokens of a row. Requires `cuts`."""
        layers = [layer.of_tokens(row, length) for layer in self._layers if isinstance(layer, KeyRows)]
        mx.eval(layers)  # Copy now: the next step changes the rows in place.
        return Prompt(length, layers)

    def cut(self, prompt: Prompt, length: int) -> Prompt:
        """Return the first `length` tokens of a prompt. Requires `cuts`."""
        return Prompt(length, [(keys[:, :, :length], values[:, :, :length]) for keys, values in prompt.layers])

    def put(self, prompt: Prompt, rows: Sequence[int]) -> None:
        targets = mx.array(rows)
        for layer, part in zip(self._layers, prompt.layers or [()] * len(self._layers), strict=True):
            layer.put(part, targets)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        from_rows, to_rows = mx.array(sources), mx.array(targets)
        for layer in self._layers:
            layer.move(from_rows, to_rows)

    def step(self, tokens_R: NDArray[np.int32], positions_R: NDArray[np.int32]) -> NDArray[np.float32]:
        """Feed the next tokens [R] of rows 0 .. R-1 at their positions [R]. Return the logits after them, [R, V]."""
        self._step.set(positions_R)
        logits = self._model(mx.array(tokens_R)[:, None], cache=self._layers)[:, -1].astype(mx.float32)
        mx.eval(logits)
        return np.array(logits, copy=False)


def round_up(length: int) -> int:
    """Return the number of tokens to reserve for a row of up to `length` tokens."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _batches(prompts: Sequence[NDArray[np.int32]], *, alike: bool) -> Iterator[list[int]]:
    """Yield batches of prompt indices, short prompts first, each of at most `_PREFILL_TOKENS` tokens with padding.

    Prompts of one token are skipped. If `alike`, all prompts of a batch have one length.
    """
    batch: list[int] = []
    for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number])):
        length = len(prompts[number]) - 1
        if length == 0:
            continue
        differs = batch and alike and len(prompts[batch[0]]) - 1 != length
        if batch and (differs or (len(batch) + 1) * length > _PREFILL_TOKENS):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _load(base_dir: Path, precision: str) -> tuple[Any, MlxForm]:
    """Return the model in evaluation mode, computing in `precision`, and its architecture."""
    weights_of(base_dir)
    form = read_form(base_dir)
    made = types.SimpleNamespace(from_dict=lambda _config: form.args)
    made_by = _with_split_experts(form.model_class) if form.family.splits_experts else form.model_class
    model, _ = load_model(base_dir, lazy=True, get_model_classes=lambda config: (made_by, made))
    dtype = _DTYPES.get(precision, mx.float32)
    keeps_dtype = getattr(model, "cast_predicate", lambda _path: True)
    model.update(
        tree_map_with_path(
            lambda path, one: one.astype(dtype) if mx.issubdtype(one.dtype, mx.floating) and keeps_dtype(path) else one,
            model.parameters(),
        )
    )
    if precision in _BITS:
        nn.quantize(model, _BLOCK, _BITS[precision], class_predicate=_quantisable(model))
    mx.eval(model.parameters())
    if form.rope.get("truncate") is False:
        _keep_fractions(model, form.rope)
    if form.family.rounds_embedding_scale and dtype == mx.float32:
        model.model.embed_tokens = _ExactScale(model.model.embed_tokens, form.hidden_size)
    return model, form


def _with_split_experts(model_class: Any) -> Any:
    """Return a subclass of mlx-lm's gpt-oss class that also loads weights that are not quantized. Their shape is
    [experts, inputs, outputs], and gates and values alternate.
    """

    class WithSplitExperts(model_class):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            found = {}
            for name, weight in weights.items():
                layer, _, last = name.rpartition(".experts.")
                kind, _, is_bias = last.partition("_proj")
                if not layer:
                    found[name] = weight
                    continue
                whole = weight if is_bias else weight.swapaxes(1, 2)
                end = "bias" if is_bias else "weight"
                axis = (slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))
                parts = zip(("gate", "up"), axis, strict=True) if kind == "gate_up" else ((kind, slice(None)),)
                for part, rows in parts:
                    found[f"{layer}.experts.{part}_proj.{end}"] = mx.contiguous(whole[rows])
            return found

    return WithSplitExperts


def _quantisable(model: Any) -> Any:
    """Return the function that tells `nn.quantize` which layers to quantize: all that can be, except those that choose
    experts. mlx-lm's own conversion also gives these more bits.
    """
    special = getattr(model, "quant_predicate", None) or (lambda _path, _module: True)

    def predicate(path: str, module: Any) -> bool:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % _BLOCK == 0
        return fits and special(path, module) is True

    return predicate


def _keep_fractions(model: Any, rope: Any) -> None:
    """Set the rotary frequencies of YaRN without `truncate` (arXiv 2309.00071, section 3.2), because mlx-lm always
    rounds the ends of the range.
    """
    base, factor = rope["rope_theta"], rope["factor"]
    for module in model.modules():
        if isinstance(module, YarnRoPE):
            size = module.dims

            def turning(times: float, size: int = size) -> float:
                length = rope["original_max_position_embeddings"] / (times * 2 * math.pi)
                return float(size * math.log(length) / (2 * math.log(base)))

            low = max(turning(rope.get("beta_fast") or 32), 0)
            high = min(turning(rope.get("beta_slow") or 1), size - 1)
            slow = np.clip((np.arange(size // 2) - low) / (max(high - low, 0.001)), 0, 1)
            plain = base ** (np.arange(0, size, 2) / size)
            module._freqs = mx.array(1 / (slow / (factor * plain) + (1 - slow) / plain), mx.float32)


class _ExactScale(nn.Module):  # type: ignore[misc]
    """Embedding layer for a model that multiplies embeddings by √size rounded to bfloat16. It corrects the product to
    the exact factor.
    """

    def __init__(self, embedding: Any, size: int) -> None:
        super().__init__()
        self.embedding = embedding
        exact = math.sqrt(size)
        self._correction = exact / mx.array(exact, mx.bfloat16).astype(mx.float32).item()

    def __call__(self, ids: mx.array) -> mx.array:
        return self.embedding(ids) * self._correction

    def as_linear(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(x)


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
