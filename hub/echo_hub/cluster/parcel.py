"""The local files that a process on another machine needs, as one zip.

base/        the base model's files: all, or only those of its tokenizer
modules/     Python modules
files/N/     single files
work/        the user's directory, in which the process works. From there, the other files are at
             ../base and ../files/N/NAME
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
"""Maximum size of all files together, in bytes."""
PACKAGES: Final = ("echo_hub", "echo_shared")
"""Packages whose source must be the same on both machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """The files to send. `contents` maps a path in the zip to a local file or directory."""

    contents: Mapping[str, Path] = field(default_factory=dict)
    lies_there: Mapping[str, int] = field(default_factory=dict)
    """Files that are not sent, with their sizes in bytes. The other machine must have each file at the same path."""

    def write(self, path: Path) -> None:
        """Write the zip. Raises ConfigError if a file cannot be read, or if all files together exceed MOST_BYTES."""
        size = 0
        try:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                for name, source in self.files():
                    size += source.stat().st_size
                    if size > MOST_BYTES:
                        raise ConfigError(
                            "The files to send to the cluster are too large.",
                            got=f"more than {MOST_BYTES // 2**20} MiB up to {source}",
                            do="Put large files under the same path on all machines, and outside ray.working_dir.",
                        )
                    # Weights are stored uncompressed, because compression would hardly shrink them.
                    archive.write(source, name, ZIP_STORED if source.suffix == ".safetensors" else None)
        except OSError as error:
            raise ConfigError(
                "A file to send to the cluster cannot be read.", got=str(error), do="See ray.working_dir."
            ) from error

    def files(self) -> Iterator[tuple[str, Path]]:
        for name, source in self.contents.items():
            if source.is_dir():
                for file in sorted(source.rglob("*")):
                    parts = file.relative_to(source).parts
                    if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
                        yield str(PurePosixPath(name, *parts)), file
            else:
                yield name, source


def base_model(base_dir: Path) -> tuple[Parcel, str]:
    """Return a base model's parcel, and the model's path relative to the parcel's directory `work`.

    A model larger than `MOST_BYTES` is not sent, and its path is absolute.
    """
    sizes = {str(file): file.stat().st_size for _, file in Parcel(contents={"base": base_dir.absolute()}).files()}
    if sum(sizes.values()) > MOST_BYTES:
        return Parcel(lies_there=sizes), str(base_dir.absolute())
    return Parcel(contents={"base": base_dir}), "../base"


def lacking(lies_there: Mapping[str, int]) -> str:
    """Return the first file that this machine lacks or has in a different size; "" if all files are there."""
    for name, size in lies_there.items():
        file = Path(name)
        if not file.is_file() or file.stat().st_size != size:
            return name
    return ""


def unpack(packed: Path, directory: Path) -> dict[str, str]:
    """Unpack a parcel into `directory`. Return the environment variables for a process that works in the parcel's
    directory `work`."""
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(directory)
    for name in ("work", "modules"):
        (directory / name).mkdir(exist_ok=True)
    own = os.environ.get("PYTHONPATH")  # Keep the path, so that child and parent import the same Echo.
    return {"PYTHONPATH": ":".join([str(directory / "work"), str(directory / "modules"), *([own] if own else [])])}


def source_hash() -> str:
    """Return a hash of the installed source of all `PACKAGES` on this machine."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        root = Path(str(resources.files(package)))
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
