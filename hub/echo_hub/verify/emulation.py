"""Emulate engines of lower precision on the hub's own model, to measure their rounding without running them.

    with emulating("q8_0", weights):
        states = policy's forward pass        computes each matrix product as an 8-bit engine does

A PyTorch dispatch mode intercepts every operator and rounds what an engine of the precision rounds:

    f16, bf16    the mantissa of every operator's result, as a model in that precision stores it; the range is not
                 limited, because such a model computes sums of squares in float32
    q8_0, ...    in products with the model's weights: weights in blocks as llama.cpp packs them, the other factor
                 to 8 bits in blocks of 32, as llama.cpp does before integer products
    f32          nothing; a model stored in 16 bits is computed in float32

So the emulation needs no second copy of the model and no other library. It works with any forward pass, on the
verifier's device. Formats follow ggml's `ggml-quants.c`, and the choice of types `llama-quant.cpp`. If an engine uses
finer types for some layers, the emulation uses the coarser type for all, so it is never finer than the real engine.
Blocks begin at the engine's block boundaries. A base unpacked from such a format therefore loses as little as in the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

BLOCK: Final = 32
SUPERBLOCK: Final = 256
"""Number of inputs in one block of llama.cpp's K-quants. A layer whose number of inputs is not a multiple of it gets a
simpler format."""
_aten = torch.ops.aten
_MANTISSA_BITS: Final = {"f16": 10, "bf16": 7}
_EXACT: Final = "f32"
_HALVES: Final = (torch.bfloat16, torch.float16)
_PRODUCTS: Final = {_aten.mm: 0, _aten.addmm: 1, _aten.addmm_: 1}
"""Matrix products, each with the index of the argument that is the first factor. The argument after it is the
transposed weight of a layer."""

_IS_WEIGHT: Final = "_echo_is_base_weight"
"""Attribute that marks a tensor as a base weight in another shape or precision."""

Rounding = Callable[[Tensor], Tensor]


def symmetric(bits: int) -> Rounding:
    """Return a function that rounds blocks to `bits` bits with one float16 scale per block, as q8_0, q5_0 and q4_0
    do."""
    most = 2 ** (bits - 1) - 1

    def rounded(blocks: Tensor) -> Tensor:
        scale = _in_float16(blocks.abs().amax(dim=-1, keepdim=True) / most)
        whole: Tensor = (blocks / scale.clamp(min=1e-12)).round().clamp(-most - 1, most)
        rounded_to: Tensor = whole * scale
        return rounded_to

    return rounded


def affine(bits: int) -> Rounding:
    """Return a function that rounds blocks to `bits` bits with a float16 scale and minimum per block, as q5_1 does and
    K-quants nearly do."""
    most = 2**bits - 1

    def rounded(blocks: Tensor) -> Tensor:
        low = _in_float16(blocks.amin(dim=-1, keepdim=True))
        scale = _in_float16((blocks.amax(dim=-1, keepdim=True) - low) / most)
        whole: Tensor = ((blocks - low) / scale.clamp(min=1e-12)).round().clamp(0, most)
        rounded_to: Tensor = whole * scale + low
        return rounded_to

    return rounded


def _in_float16(values: Tensor) -> Tensor:
    """Round float32 `values` to float16. Values outside the range of float16 become its largest values."""
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half().float()


def _weight_rounding(precision: str, num_inputs: int) -> Rounding:
    """Return the rounding of the weights of a layer with `num_inputs` inputs. An unknown precision gets `symmetric(4)`,
    the coarsest rounding."""
    is_whole = num_inputs % SUPERBLOCK == 0
    if precision.startswith("q8"):
        return symmetric(8)
    if precision.startswith("q6"):
        return symmetric(6) if is_whole else symmetric(8)
    if precision.startswith("q5"):
        return affine(5)
    if precision.startswith("q4_k"):
        return affine(4) if is_whole else symmetric(5)
    return symmetric(4)


def with_mantissa(values: Tensor, bits: int) -> Tensor:
    """Round float32 `values` to `bits` bits of mantissa, to nearest, ties away from 0. The range stays that of
    float32."""
    spare = 23 - bits
    whole: Tensor = values.contiguous().view(torch.int32).add(1 << (spare - 1)) >> spare << spare
    return whole.view(torch.float32)


def in_blocks(values: Tensor, rounding: Rounding) -> Tensor:
    """Return `values` in float32, rounded in blocks of `BLOCK` along the last dimension."""
    size = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -size % BLOCK))
    return rounding(padded.unflatten(-1, (-1, BLOCK))).flatten(-2)[..., :size]


class _Emulation(TorchDispatchMode):
    def __init__(self, precision: str, weights: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._precision = precision
        self._mantissa_bits = _MANTISSA_BITS.get(precision)
        self._weights = weights
        self._last: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] | None = None
        """Key and result of the last call of `_packed_weight`: the output layer needs the same weight for each chunk of
        rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view = _is_view(func)
        if is_view or func.overloadpacket is _aten._to_copy:
            result = func(*args, **_exact_dtype(kwargs))
            # Mark views and copies of a weight as weights, too.
            if isinstance(result, Tensor):
                setattr(result, _IS_WEIGHT, self._is_weight(args[0]))
            return result if is_view or self._mantissa_bits is None else self._rounded(func, result)
        place = None if self._precision == _EXACT or self._mantissa_bits else _PRODUCTS.get(func.overloadpacket)
        is_packed = place is not None and self._is_weight(args[place + 1])
        packed = self._packed_weight(args[place + 1]) if place is not None and is_packed else None
        args, kwargs = tree_map(_exact, (list(args), _exact_dtype(kwargs)))
        if place is not None and packed is not None:
            args[place], args[place + 1] = in_blocks(args[place], symmetric(8)), packed
        if kwargs.pop("out_dtype", None) is not None or func is getattr(_aten.mm, "dtype_out", None):
            func, args = _aten.mm.out, args[:2]
        result = func(*args, **kwargs)
        return result if self._mantissa_bits is None else self._rounded(func, result)

    def _is_weight(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        return bool(getattr(value, _IS_WEIGHT, False)) or value.untyped_storage().data_ptr() in self._weights

    def _rounded(self, func: Any, result: Any) -> Any:
        """Return the rounded result; an operator that writes in place has its result rounded in place."""
        assert self._mantissa_bits is not None
        if isinstance(result, Tensor) and result.dtype is torch.float32 and result.dim() > 1:
            rounded = with_mantissa(result, self._mantissa_bits)
            return result.copy_(rounded) if func._schema.is_mutable else rounded
        return result

    def _packed_weight(self, weight_IO: Tensor) -> Tensor:
        """Return the transposed weight of a layer in float32, rounded as the engine packs it. I and O: number of inputs
        and outputs."""
        is_kept = weight_IO.untyped_storage().data_ptr() in self._weights
        key = (weight_IO.data_ptr(), tuple(weight_IO.shape), tuple(weight_IO.stride()))
        if is_kept and self._last is not None and self._last[0] == key:
            return self._last[1]
        weight_OI = weight_IO.T
        packed = in_blocks(weight_OI, _weight_rounding(self._precision, weight_OI.shape[-1])).T
        self._last = (key, packed) if is_kept else None
        return packed


def _is_view(func: Any) -> bool:
    """Return True if the operator returns a view of its first argument and writes nothing."""
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


@contextmanager
def emulating(precision: str, weights: Collection[int]) -> Iterator[None]:
    """Round computations inside the block as an engine of this precision does. No autograd graph is recorded.

    `weights`: addresses of the storages (`untyped_storage().data_ptr()`) of all weights that such an engine packs.
    """
    with torch.no_grad(), _Emulation(precision, weights):
        yield


def exactly(*, in_float32: bool) -> AbstractContextManager[None]:
    """With `in_float32`, compute inside the block in float32 although the weights are stored in 16 bits; no autograd
    graph is recorded. Each weight is converted only when it is used, so the model takes half the memory, and the
    results equal those of float32 weights."""
    return emulating(_EXACT, ()) if in_float32 else nullcontext()


def _exact(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _exact_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "dtype": torch.float32} if kwargs.get("dtype") in _HALVES else kwargs
