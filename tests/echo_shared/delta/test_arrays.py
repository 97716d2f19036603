"""Encoded arrays decode to the same bits, and the differences that an optimizer step makes compress well."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_shared.delta.arrays import MIN_GROUP, PATTERNS, Patterns, decode_array, encode_array
from echo_shared.delta.frames import FrameReader, FrameWriter
from echo_shared.errors import CodecError

SPECIAL: dict[str, list[int]] = {
    "F32": [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 1, 0x80000001],
    "F16": [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7FFF, 1, 0x8001],
    "BF16": [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7FFF, 1, 0x8001],
}
"""Bit patterns by dtype: zeros, infinities, NaNs of both signs, the largest values, the smallest numbers."""


def coded(new: Patterns, old: Patterns, dtype: str) -> bytes:
    stream = io.BytesIO()
    encode_array(new, old, dtype, FrameWriter(stream))
    return stream.getvalue()


def there_and_back(new: Patterns, old: Patterns, dtype: str) -> Patterns:
    reader = FrameReader(io.BytesIO(coded(new, old, dtype)))
    back = decode_array(old, dtype, reader)
    reader.expect_end()
    return back


@pytest.mark.parametrize("dtype", PATTERNS)
def test_special_values_against_each_other(dtype: str) -> None:
    patterns = np.array(SPECIAL[dtype], PATTERNS[dtype])
    new, old = (grid.reshape(-1) for grid in np.meshgrid(patterns, patterns))
    np.testing.assert_array_equal(there_and_back(new, old, dtype), new)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(PATTERNS)),
    size=st.sampled_from([0, 1, 2, 3, 5, MIN_GROUP - 1, MIN_GROUP, MIN_GROUP + 1, 5_003]),
    spread=st.sampled_from([1, 2, 3, 15, 16, 300, 70_000]),
    outliers=st.sampled_from([0.0, 0.01, 0.05, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_any_bits_decode_unchanged(dtype: str, size: int, spread: int, outliers: float, seed: int) -> None:
    """Most values change little, as in an optimizer step; the share `outliers` is unrelated to the old values."""
    rng = np.random.default_rng(seed)
    patterns = PATTERNS[dtype]
    old = rng.integers(0, 1 << 8 * patterns.itemsize, size, np.uint64).astype(patterns)
    new = old + rng.integers(0, spread, size).astype(patterns)
    new = np.where(rng.random(size) < outliers, rng.permutation(old), new).astype(patterns)
    np.testing.assert_array_equal(there_and_back(new, old, dtype), new)


def brain(values: Any) -> Patterns:
    """Return values as bit patterns of bfloat16, rounded to nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_equal_steps_compress_well_and_a_keyframe_is_smaller_than_the_values() -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, 100_000)
    old, new = brain(weights), brain(weights + rng.normal(0, 1e-5, weights.size))
    changed = float(np.mean(old != new))
    assert 0.1 < changed < 0.3
    assert len(coded(new, old, "BF16")) < 0.1 * new.nbytes
    assert len(coded(old, old, "BF16")) < 0.005 * new.nbytes
    assert len(coded(new, np.zeros_like(new), "BF16")) < 0.75 * new.nbytes
    noise = rng.integers(0, 1 << 16, weights.size).astype(np.uint16)
    assert len(coded(noise, old, "BF16")) < 1.02 * noise.nbytes, "incompressible data grows by less than 2 %"


def test_known_bytes_decode() -> None:
    """Other versions of Echo read this format, so its bytes must not change. The bytes were made by hand, with two bits
    per value and values sorted by exponent: 0.5 goes one step up, 1 goes one step down, -1 stays.
    """
    frame = bytes.fromhex("28b52ffd 20 01 090000 06")
    stream = io.BytesIO(bytes([2, len(frame), 0, 0, 0]) + frame)
    new = decode_array(brain([1.0, -1.0, 0.5]), "BF16", FrameReader(stream))
    assert new.tolist() == [0x3F7F, 0xBF80, 0x3F01]


def test_symbols_of_another_width_are_refused() -> None:
    old = np.zeros(4, np.uint16)
    for bits in (0, 1, 3, 5, 16, 255):
        with pytest.raises(CodecError, match="damaged"):
            decode_array(old, "BF16", FrameReader(io.BytesIO(bytes([bits]) + bytes(64))))
