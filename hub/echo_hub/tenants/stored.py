"""Requests and outcomes as bytes for the database: MessagePack in a zstd frame.

Dataclasses, enums, tuples, sets and numpy arrays come back as they were. Only this hub reads what it wrote, so the
bytes are trusted. A field that an older hub did not write gets its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
import zstandard

from echo_hub.tenants import outcomes, requests

_ARRAY, _DATACLASS, _TUPLE, _ENUM, _SET = range(1, 6)
_LEVEL: Final = 3
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateWork:
    """Work of a request: create the model."""

    lora: requests.LoraWish


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWork:
    """Work of a request: save a model's weights under `path`; with an empty path, make a version for the sampler
    `sampler_id` alone."""

    weights: requests.WeightsKind
    path: str
    sampler_id: str = ""
    inflight: bool = False
    ttl_s: float | None = None
    overwrite: bool = False
    recipients: tuple[str, ...] = ()
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWork:
    """Work of a request: load the weights of `path` into the model. With `lora`, create the model first."""

    path: str
    optimizer: bool
    lora: requests.LoraWish | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleWork:
    """Work of a `sample` request. Its version and seed are fixed."""

    prompt_ids: np.ndarray[Any, np.dtype[np.int32]]
    wish: requests.SamplingWish
    sequence_ids: tuple[str, ...]
    policy_version: int
    seed: int
    first_index: int


Work = CreateWork | SaveWork | LoadWork | SampleWork | requests.ForwardBackward | requests.AdamStep

_CLASSES: Final[Mapping[str, type]] = {
    one.__name__: one
    for one in (
        CreateWork,
        SaveWork,
        LoadWork,
        SampleWork,
        requests.ForwardBackward,
        requests.AdamStep,
        requests.Datum,
        requests.SampledSpan,
        requests.LoraWish,
        requests.SamplingWish,
        requests.PassResult,
        requests.Sample,
        requests.PromptLogprobs,
        requests.SampleResult,
        outcomes.ModelCreated,
        outcomes.StepTaken,
        outcomes.WeightsSaved,
        outcomes.WeightsLoaded,
        outcomes.Failed,
    )
}
_ENUMS: Final[Mapping[str, type[StrEnum]]] = {
    one.__name__: one for one in (requests.LossFunction, requests.WeightsKind)
}


def pack_stored(value: Work | outcomes.Outcome) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(_pack(value))


def unpack_stored(data: bytes, kind: type[T]) -> T:
    """Return the value that `data` holds. It must be a `kind`."""
    value = _unpack(zstandard.ZstdDecompressor().decompress(data))
    assert isinstance(value, kind)
    return value


def unpack_outcome(data: bytes) -> outcomes.Outcome:
    value: outcomes.Outcome = _unpack(zstandard.ZstdDecompressor().decompress(data))
    return value


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_default, strict_types=True)
    return packed


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_ext_hook, strict_map_key=False)


def _default(value: Any) -> msgpack.ExtType:
    match value:
        case np.ndarray():
            return msgpack.ExtType(_ARRAY, _pack([value.dtype.str, list(value.shape), value.tobytes()]))
        case StrEnum():
            return msgpack.ExtType(_ENUM, _pack([type(value).__name__, str(value.value)]))
        case tuple():
            return msgpack.ExtType(_TUPLE, _pack(list(value)))
        case frozenset():
            return msgpack.ExtType(_SET, _pack(sorted(value)))
        case _ if is_dataclass(value):
            content = {field.name: getattr(value, field.name) for field in fields(value)}
            return msgpack.ExtType(_DATACLASS, _pack([type(value).__name__, content]))
        case Mapping():
            return msgpack.ExtType(_DATACLASS, _pack(["", dict(value)]))
    raise TypeError(f"{type(value).__name__} cannot be stored")


def _ext_hook(code: int, data: bytes) -> Any:
    content = _unpack(data)
    match code:
        case 1:
            dtype, shape, raw = content
            return np.frombuffer(raw, dtype=dtype).reshape(shape)
        case 2:
            name, values = content
            return _CLASSES[name](**values) if name else values
        case 3:
            return tuple(content)
        case 4:
            name, value = content
            return _ENUMS[name](value)
        case 5:
            return frozenset(content)
    raise ValueError(f"unknown extension type {code}")
