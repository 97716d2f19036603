"""Files of this machine that a process elsewhere needs, as one zip.

base/        of the base model: all, or what its tokenizer is made of
modules/     Python modules
files/N/     single files
work/        a directory of the user's; the process works in it, so the others are at ../base, ../files/N/NAME
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import ZIP_STORED

from echo_shared.errors import ConfigError

MOST_BYTES: Final = 2**29
"""Of all files together."""
PACKAGES: Final = ("echo_hub", "echo_shared")
"""What has to be the same here and there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Where each file or directory comes from, by its place in the zip."""

    contents: Mapping[str, Path] = field(default_factory=dict)
    lies_there: Mapping[str, int] = field(default_factory=dict)
    """Files that are not in the zip, but have to lie under the same path where it goes, and how many bytes they have.
    """

    def write(self, path: Path) -> None:
        """Writes the zip. Raises ConfigError for what cannot be read, or is too large."""
        size = 0
        try:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                for name, source in self.files():
                    size += source.stat().st_size
                    if size > MOST_BYTES:
                        raise ConfigError(
                            "What is to be sent to the cluster is too large.",
                            got=f"more than {MOST_BYTES // 2**20} MiB up to {source}",
                            do="Put large files where all machines find them under the same path, and out of "
                            "ray.working_dir.",
                        )
                    # Weights are noise to a compressor.
                    archive.write(source, name, ZIP_STORED if source.suffix == ".safetensors" else None)
        except OSError as error:
            raise ConfigError(
                "What is to be sent to the cluster cannot be read.", got=str(error), do="See ray.working_dir."
            ) from error

    def files(self) -> Iterator[tuple[str, Path]]:
        """Each file and its place in the zip."""
        for name, source in self.contents.items():
            if source.is_dir():
                for file in sorted(source.rglob("*")):
                    parts = file.relative_to(source).parts
                    if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
                        yield str(PurePosixPath(name, *parts)), file
            else:
                yield name, source


def base_model(base_dir: Path) -> tuple[Parcel, str]:
    """All of a base model, and where a process finds it that works in the parcel's `work`. One of more than
    `MOST_BYTES` is not sent."""
    sizes = {str(file): file.stat().st_size for _, file in Parcel(contents={"base": base_dir.absolute()}).files()}
    if sum(sizes.values()) > MOST_BYTES:
        return Parcel(lies_there=sizes), str(base_dir.absolute())
    return Parcel(contents={"base": base_dir}), "../base"


def lacking(lies_there: Mapping[str, int]) -> str:
    """The first of such files that is not here, or has another size; empty: there is none."""
    for name, size in lies_there.items():
        file = Path(name)
        if not file.is_file() or file.stat().st_size != size:
            return name
    return ""


def unpack(packed: Path, directory: Path) -> dict[str, str]:
    """Puts a parcel's files into `directory`; what a process that works in its `work` needs in its environment."""
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(directory)
    for name in ("work", "modules"):
        (directory / name).mkdir(exist_ok=True)
    own = os.environ.get("PYTHONPATH")  # Or it might import another Echo than who starts it.
    return {"PYTHONPATH": ":".join([str(directory / "work"), str(directory / "modules"), *([own] if own else [])])}


def source_hash() -> str:
    """Of all modules of `PACKAGES` as they are installed here."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        root = Path(str(resources.files(package)))
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
