"""Read GGUF files that others have made. `read_summary` returns metadata and tensor sizes, without weights and
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import gguf

_VOCABULARY: Final = "tokenizer."
_KEPT: Final = 4
"""Number of summaries to keep in memory, because reading a file takes seconds if it has a vocabulary."""


class CheckedReader(gguf.GGUFReader):
    """Reads a GGUF file of unknown origin. Raises OSError, and ValueError, KeyError or IndexError for a damaged file.

    The package gguf's own reader accepts a file that ends too early: it returns empty arrays for the missing bytes. A
    list that claims 2**60 items would then fill the memory with empty arrays.
    """

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
        except RecursionError as error:
            raise ValueError("lists in lists, too deep to read") from error

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError("the file ends too early")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSummary:
    metadata: Mapping[str, Any]
    """All values of the file's metadata by key, except those of the vocabulary."""
    sizes: Mapping[str, tuple[int, ...]]
    """Size of each tensor by name, in llama.cpp's order: a matrix has inputs first, then outputs."""


def read_summary(path: Path) -> GgufSummary:
    """Read the file, or return the summary of an earlier call if the file has not changed. Raises OSError, and
    ValueError, IndexError or KeyError if the file is damaged.
    """
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=_KEPT)
def _read(path: Path, size: int, mtime_ns: int) -> GgufSummary:
    reader = CheckedReader(path)
    return GgufSummary(
        metadata={key: field.contents() for key, field in reader.fields.items() if not key.startswith(_VOCABULARY)},
        sizes={tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors},
    )
