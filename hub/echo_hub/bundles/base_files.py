"""Identify a bundle's base model by hashes of its files, and compare a checker's copy with them.

A model in Hugging Face layout is identified by all its files. A base model from a GGUF file is identified by this file
and the converted weights. The other converted files depend on the version of transformers that wrote them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from echo_hub.bundles.reading import BundledRun
from echo_hub.run.base_files import MODEL_FILES
from echo_hub.run.gguf_base import gguf_in
from echo_shared.errors import CodecError, ConfigError
from echo_shared.gguf.file_names import part_names

_WEIGHTS = ".safetensors"


def naming_files(reference: str, directory: Path) -> dict[str, Path]:
    """Return the files that identify a base model, by name. `directory` is what `resolve_base(reference)` has
    returned."""
    found = {path.name: path for pattern in MODEL_FILES for path in sorted(directory.glob(pattern))}
    file = gguf_in(Path(reference).expanduser())
    if file is None:
        return found
    parts = {name: file.with_name(name) for name in part_names(file.name)}
    return {**parts, **{name: path for name, path in found.items() if name.endswith(_WEIGHTS)}}


def check_base(reference: str, directory: Path, run: BundledRun) -> None:
    """Raise ConfigError unless the checker's base model has all files of the run's base model, with the same content.
    The model's name does not matter.
    """
    there = naming_files(reference, directory)
    if not any(name.endswith(_WEIGHTS) for name in run.base):
        raise CodecError("The bundle names no weights of a base model.", got=", ".join(run.base) or "no files")
    for name, wanted in sorted(run.base.items()):
        if name not in there:
            got = "is missing"
        elif sha256(there[name]) != wanted:
            got = "has another content"
        else:
            continue
        raise ConfigError(
            "This is not the base model of the bundle's run.",
            got=f"{name} of {reference} {got}",
            do="Name the base model of the run with --base: the same GGUF file, or the same directory or id.",
        )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
