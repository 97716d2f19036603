"""Read a bundle that a stranger made. Nothing in the bundle is trusted: every file must have the size and hash of the
signed manifest, and all sizes are limited. Raises CodecError for a bundle that is damaged or breaks the format.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_hub.bundles.blocks import BundledGroup, unpack_block
from echo_hub.bundles.layout import (
    ADAPTERS,
    BLOCK_BYTES,
    CHECKPOINTS,
    LINE_BYTES,
    MANIFEST,
    MANIFEST_BYTES,
    NODES,
    ROLLOUTS,
    RUN,
    RUN_BYTES,
    STEPS,
    BundleFile,
    BundleManifest,
    verified,
    version_of,
)
from echo_shared.errors import CodecError
from echo_shared.files.strict_json import read_json

_HASHED_BYTES = 1 << 20


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class BundledStep(_Record):
    """One trained step, as the hub recorded it."""

    step: int = Field(ge=1)
    num_groups: int = Field(ge=0)
    num_rollouts: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    mean_reward: float
    staleness: int = Field(ge=0)
    planned_at: float
    trained_at: float
    metrics: dict[str, float]


class BundledNode(_Record):
    """One node, as the hub describes it."""

    node: str = Field(max_length=64)
    numerics: tuple[str, str, str]
    standing: str = Field(default="", max_length=16)
    name: str = Field(default="", max_length=64)


class BundledRepeat(_Record):
    """The settings with which the named step is repeated: `echo_hub.bundles.writing.RepeatableStep`."""

    step: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    objective: str
    micro_batch_tokens: int = Field(ge=1)
    gradient_checkpointing: bool
    has_checkpoint: bool
    precision: Literal["float32", "bfloat16"]
    machine: str = Field(max_length=64)


class BundledRun(_Record):
    """Facts about the run as a whole."""

    settings: dict[str, Any]
    judges: tuple[str, ...] = ()
    base: dict[str, str]
    """SHA-256 of the base model's files, by name."""
    content_hash: str = ""
    """Hash of the files from which the tasks' problems come; "" if there are none."""
    started_with: int = Field(ge=0)
    accounting: dict[str, Any]
    retired: dict[str, int]
    rollouts: int = Field(ge=0)
    versions: tuple[int, ...]
    repeatable: BundledRepeat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFault:
    """A missing file, or a file whose content differs from the signed one."""

    path: str
    fault: str


class Bundle:
    """A bundle on disk whose manifest has a valid signature; open it with `open`."""

    def __init__(self, root: Path, manifest: BundleManifest) -> None:
        self.root = root
        self.manifest = manifest
        self._files = {file.path: file for file in manifest.files}

    @classmethod
    def open(cls, root: Path) -> Bundle:
        path = root / MANIFEST
        try:
            if path.is_symlink() or path.stat().st_size > MANIFEST_BYTES:
                raise CodecError("The bundle's manifest is a link or too large.", got=str(path))
            manifest = verified(path.read_bytes())
        except OSError as error:
            raise CodecError(
                "This is not a bundle.", got=f"{path}: {error.strerror}", do="Name the directory of a bundle."
            ) from error
        bundle = cls(root, manifest)
        if len(bundle._files) < len(manifest.files):
            raise CodecError("The bundle's manifest names a file twice.", got=str(path))
        for needed in (RUN, NODES, STEPS):
            if needed not in bundle._files:
                raise CodecError("The bundle lacks a file.", got=needed)
        return bundle

    def faults(self) -> Iterator[FileFault]:
        """Yield the files that are missing or changed, compared by size and SHA-256. Reads all files."""
        for file in self.manifest.files:
            try:
                with self._opened(file) as content:
                    digest = hashlib.sha256()
                    while part := content.read(_HASHED_BYTES):
                        digest.update(part)
                if digest.hexdigest() != file.sha256:
                    yield FileFault(path=file.path, fault="its content differs from what the hub signed")
            except CodecError as error:
                yield FileFault(path=file.path, fault=error.brief)

    def run(self) -> BundledRun:
        content = self._read(RUN, RUN_BYTES)
        try:
            return BundledRun.model_validate(read_json(content))
        except ValidationError as error:
            raise _not_valid(RUN, error) from error
        except ValueError as error:
            raise CodecError("A file of the bundle is not valid.", got=f"{RUN}: {error}") from error

    def nodes(self) -> Iterator[BundledNode]:
        for number, line in self._lines(NODES):
            try:
                yield BundledNode.model_validate(line)
            except ValidationError as error:
                raise _not_valid(f"{NODES}, line {number}", error) from error

    def steps(self) -> Iterator[BundledStep]:
        for number, line in self._lines(STEPS):
            try:
                yield BundledStep.model_validate(line)
            except ValidationError as error:
                raise _not_valid(f"{STEPS}, line {number}", error) from error

    def groups(self) -> Iterator[list[BundledGroup]]:
        """Yield the groups block by block, in the order of their ids."""
        for path in sorted(path for path in self._files if path.startswith(f"{ROLLOUTS}/")):
            try:
                yield unpack_block(self._read(path, BLOCK_BYTES))
            except CodecError as error:
                raise CodecError(error.what, got=f"{path}: {error.got}") from error

    @property
    def adapters(self) -> dict[int, Path]:
        """Return the directories of the policy versions in the bundle, by version."""
        return self._directories(ADAPTERS)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Return the directories of the checkpoints in the bundle, by step."""
        return self._directories(CHECKPOINTS)

    def copy(self, source: Path, destination: Path) -> None:
        """Copy the signed files of an adapter or checkpoint directory. Unsigned files are skipped."""
        destination.mkdir(parents=True)
        for file in self.manifest.files:
            if (self.root / file.path).parent == source:
                with self._opened(file) as content, (destination / Path(file.path).name).open("wb") as copied:
                    shutil.copyfileobj(content, copied)

    def _directories(self, kind: str) -> dict[int, Path]:
        paths = {(self.root / path).parent for path in self._files if path.startswith(f"{kind}/")}
        return {version_of(path): path for path in sorted(paths)}

    def _lines(self, path: str) -> Iterator[tuple[int, Any]]:
        file = self._files[path]
        digest = hashlib.sha256()
        with self._opened(file) as content:
            number = 0
            while line := content.readline(LINE_BYTES + 1):
                number += 1
                digest.update(line)
                if len(line) > LINE_BYTES:
                    raise CodecError("A line of the bundle is too long.", got=f"{path}, line {number}")
                try:
                    yield number, read_json(line)
                except ValueError as error:
                    raise CodecError("A line of the bundle is not valid.", got=f"{path}, {number}: {error}") from error
        if digest.hexdigest() != file.sha256:
            raise CodecError("A file of the bundle is not the one that the hub signed.", got=path)

    def _read(self, path: str, limit: int) -> bytes:
        file = self._files[path]
        if file.size_bytes > limit:
            raise CodecError("A file of the bundle is too large.", got=f"{path}: {file.size_bytes} bytes")
        with self._opened(file) as content:
            found = content.read(limit + 1)
        if hashlib.sha256(found).hexdigest() != file.sha256:
            raise CodecError("A file of the bundle is not the one that the hub signed.", got=path)
        return found

    def _opened(self, file: BundleFile) -> IO[bytes]:
        """Open a file after checking its size. Links are refused, because they may lead out of the bundle."""
        path = self.root / file.path
        try:
            if path.resolve() != self.root.resolve() / file.path or not path.is_file():
                raise CodecError("A file of the bundle is missing, or is a link.", got=file.path)
            size = path.stat().st_size
            if size != file.size_bytes:
                raise CodecError(
                    "A file of the bundle has another size than the one that the hub signed.",
                    got=f"{file.path}: {size} bytes instead of {file.size_bytes}",
                )
            return path.open("rb")
        except OSError as error:
            raise CodecError("A file of the bundle cannot be read.", got=f"{file.path}: {error.strerror}") from error


def _not_valid(place: str, error: ValidationError) -> CodecError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return CodecError("A file of the bundle is not valid.", got=f"{place}: {where}: {first['msg']}")
