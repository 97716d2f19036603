"""Hashes an artefact's files on disk, to describe or verify them. Every function reads whole files, so it blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from echo_shared.artefacts.manifest import Manifest, ManifestFile, verify_hashes
from echo_shared.errors import SwarmError


def describe_files(directory: Path) -> tuple[ManifestFile, ...]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return tuple(describe_file(path, name=path.relative_to(directory).as_posix()) for path in paths)


def describe_file(path: Path, *, name: str) -> ManifestFile:
    """Hash the file at `path`. Raises SwarmError if it cannot be part of an artefact."""
    try:
        return ManifestFile(path=name, size_bytes=path.stat().st_size, sha256=_sha256(path))
    except ValidationError as error:
        raise SwarmError(
            "This file cannot be part of an artefact.",
            got=f"{path}: {error.errors(include_url=False)[0]['msg']}",
            do="Remove it from the directory; models must be safetensors or GGUF.",
        ) from error


def verify_files(manifest: Manifest, directory: Path) -> None:
    """Raise SwarmError unless `directory` holds every file of `manifest` with the right size and hash."""
    paths = {file.path: directory / file.path for file in manifest.files if _has_size(directory / file.path, file)}
    verify_hashes(manifest, {name: _sha256(path) for name, path in paths.items()})


def _has_size(path: Path, file: ManifestFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
