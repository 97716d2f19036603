"""Names of GGUF files. A model is one file, or is split into several parts.

    model-q8_0.gguf                                             one file
    model-q8_0-00001-of-00003.gguf, ...-00003-of-00003.gguf     parts, named as llama.cpp's `gguf-split` names them

llama.cpp loads all parts if it gets the first one, so the parts keep their names and stay in one directory. A symbolic
link, as in the model hub's cache, is treated as a file with the link's own name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the model that the file `name` belongs to, in order; only `name` if the file is
    not a part.
    """
    found = _PART.fullmatch(name)
    if found is None or not int(found["count"]):
        return (name,)
    count = int(found["count"])
    return tuple(f"{found['stem']}-{number:05d}-of-{count:05d}{found['suffix']}" for number in range(1, count + 1))


def models_in(directory: Path) -> list[Path]:
    """Return the GGUF models in this directory, sorted. A split model is represented by its first part here."""
    files = sorted(file for file in directory.iterdir() if file.suffix.lower() == SUFFIX and file.is_file())
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(part_names(file.name)[0], file)
    return list(first.values())


def first_part(files: Sequence[Path]) -> Path | None:
    """Return the file that llama.cpp loads if these files are one model, else None."""
    if not files:
        return None
    names = part_names(files[0].name)
    return files[0].with_name(names[0]) if sorted(file.name for file in files) == sorted(names) else None
