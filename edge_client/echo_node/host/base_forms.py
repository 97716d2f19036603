"""Keeps a base model on this disk in one form only.

A base model comes as safetensors. torch, MLX and vLLM read these; llama.cpp reads a file converted from them. Once an
engine runs, the form that it reads is kept, and all other forms are deleted. The artefact's marker names the files of
that form. If the hub offers a GGUF file, llama.cpp reads that file, which is then the only form on this disk.

The order is: the converted file is synced to disk, the marker names it, the weights are deleted. If a node is killed
between two of these steps, the marker still describes a complete base model, and the node deletes the rest of the
weights before an engine starts again. If an engine needs the weights later, the base model is fetched again; the
converted file stays until that engine runs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

import psutil

from echo_node.host.artefact_files import delete_artefact, let_stand_in, recorded_files, stands_in, unmark
from echo_shared.swarm.disk import on_disk

CONVERTING: Final = "llama_cpp"
"""The only backend that reads converted files and GGUF files."""
GGUF: Final = ".gguf"
WEIGHTS: Final = "*.safetensors"
_UNFINISHED: Final = ("*.tmp", "*.f16")
_CONVERTED: Final = ("*.gguf", *_UNFINISHED)
"""Files that the conversion for llama.cpp writes, including unfinished ones."""
_OF_PROCESS: Final = re.compile(r"adapter-(\d+)-\d+\.gguf")
"""Name of an adapter's file, with the process id of the engine that loads it. Several engines share the directory."""
_CONTENT: Final = re.compile("[0-9a-f]{32}")
"""Name of a directory of converted files: the id of the base model's content."""

_SHARES: Final = {"f32": 2.0, "f16": 1.0, "bf16": 1.0, "q8_0": 0.54}
"""Size of a converted file by precision, as a multiple of the size of the 16-bit weights."""
_QUANTISING: Final = 1.5
"""Disk space for making a K-quant, as a multiple of the 16-bit weights: a 16-bit file and the result."""
_EXACT_BYTES: Final = 128 * 2**20
"""Size of 16-bit weights up to which precision `auto` converts to f32."""


def keep_one_form(base_dir: Path, derived_dir: Path, converted: Path | None) -> None:
    """Delete all files of the base model that the running engine does not read. Blocks the calling thread.

    `converted`: file in `derived_dir` that replaces the weights for this engine, or None. A base model without a marker
    keeps its weights. Raises StorageError; even then, the files that the engine reads are complete.
    """
    with on_disk(base_dir):
        if converted is not None:
            let_stand_in(base_dir, converted, instead_of=WEIGHTS)
            drop_replaced(base_dir)
        for pattern in _CONVERTED:
            for path in derived_dir.glob(pattern):
                if path != converted and not _is_in_use(path):
                    path.unlink(missing_ok=True)
        for path in derived_dir.parent.glob("*"):
            if path != derived_dir and _CONTENT.fullmatch(path.name):
                shutil.rmtree(path)


def _is_in_use(path: Path) -> bool:
    """Return True for a file of a running engine."""
    found = _OF_PROCESS.fullmatch(path.name)
    return found is not None and psutil.pid_exists(int(found[1]))


def drop_replaced(base_dir: Path) -> bool:
    """Return True if a converted file replaces the weights. Weights that a killed node left are then deleted.

    Blocks the calling thread. Raises StorageError.
    """
    if not stands_in(base_dir):
        return False
    with on_disk(base_dir):
        for path in base_dir.glob(WEIGHTS):
            path.unlink()
    return True


def came_as_gguf(base_dir: Path) -> bool:
    """Return True if the base model here is the hub's GGUF file."""
    return any(Path(path).suffix == GGUF for path in recorded_files(base_dir) if not path.startswith(".."))


def want_weights(base_dir: Path) -> bool:
    """Return True if a converted file replaces the weights, or if the base model came as a GGUF file. The base model
    then counts as missing, so that the next fetch downloads its weights.

    Blocks the calling thread. Raises StorageError.
    """
    if came_as_gguf(base_dir):
        delete_artefact(base_dir)
        return True
    if not stands_in(base_dir):
        return False
    unmark(base_dir)
    return True


def conversion_bytes(base_bytes: int, *, backend: str, precision: str) -> int:
    """Return the maximum disk space for converting a base model of `base_bytes`, including temporary files."""
    if backend not in ("auto", CONVERTING):
        return 0
    if precision == "auto":
        precision = "f32" if base_bytes <= _EXACT_BYTES else "f16"
    return int(base_bytes * _SHARES.get(precision, _QUANTISING))


def conversion_progress(base_dir: Path, derived_dir: Path, precision: str) -> tuple[int, int] | None:
    """Return (bytes written, approximate total bytes) of a running conversion; None if no conversion runs."""
    written = [size for pattern in _UNFINISHED for path in derived_dir.glob(pattern) if (size := size_of(path))]
    if not written:
        return None
    base_bytes = sum(map(size_of, base_dir.glob(WEIGHTS)))
    total = conversion_bytes(base_bytes, backend=CONVERTING, precision=precision)
    return min(sum(written), total), total


def size_of(path: Path) -> int:
    """Return the file's size in bytes; 0 if the file is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def largest_base_bytes(room_bytes: int, *, backend: str, precision: str) -> int:
    """Return the largest size of a base model whose fetch and conversion fit into `room_bytes`.

    The encrypted files in which a base model arrives have the model's size, and are deleted before the conversion.
    """
    share = max(1.0, conversion_bytes(2**40, backend=backend, precision=precision) / 2**40)
    return int(room_bytes / (1 + share))
