"""A fingerprint of the base model's files, for the field `system_fingerprint`: equal seeds give equal samples only if
the fingerprints are equal."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 64 * 2**10
_CHARACTERS: Final = 12


def fingerprint_of(directory: Path) -> str:
    """Return a fingerprint of names, sizes and samples of the content of a model's files.

    It reads at most 1 MiB of each file, evenly spread, because hashing all weights takes a minute for a large model.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".jinja"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                place = max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1)
                file.seek(place)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:_CHARACTERS]
