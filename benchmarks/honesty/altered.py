"""Other weights in place of a base's: rounded to four bits as engines do it, and with noise, for another model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from echo_shared.tensors import TensorFile

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]

BLOCK: Final = 32
NOISE: Final = 0.05


def to_four_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sixteen levels a block of 32, scaled by its largest value: llama.cpp's q4_0. K-quants need rows of 256, which the
    built-in model does not have: most of its q4_k_m is of more bits."""
    blocks = weight.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = np.where(largest == 0, 1, largest / -8).astype(np.float32)
    rounded: NDArray[np.float32] = (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(weight.shape)
    return rounded


def with_noise(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of 5 % of the weights' own spread: a model much like it, and not the same."""
    noise = np.random.default_rng(weight.size).standard_normal(weight.shape, dtype=np.float32)
    return weight + np.float32(NOISE * weight.std()) * noise


def altered(base: Path, directory: Path, change: Change) -> Path:
    """A copy of `base` in `directory` with its linear layers changed."""
    shutil.copytree(base, directory)
    for path in directory.glob("*.safetensors"):
        tensors = {
            name: change(weight) if name.endswith("_proj.weight") else weight
            for name, weight in TensorFile(path).items()
        }
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    return directory
