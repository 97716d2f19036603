"""Signed manifests of artefacts. An artefact is the files of the base model or of one policy version.

A node trusts a file only if its manifest is signed with the pinned hub key and the file has the manifest's hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from echo_shared.errors import CodecError, RemoteProtocolError, SwarmError
from echo_shared.files.file_names import is_portable_name
from echo_shared.signing import identity
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import ArtefactOffer

ALLOWED_SUFFIXES: Final = frozenset({".safetensors", ".json", ".gguf", ".txt", ".model", ".jinja"})
"""Allowed file types: safetensors or GGUF weights and plain text. Nothing that a loader could execute."""
SEALED_SUFFIX: Final = ".sealed"
PAYLOAD_NAME: Final = "payload" + SEALED_SUFFIX
"""Name of the only file that nodes fetch for a keyframe or a delta. It holds the artefact's files, encoded by
`echo_shared.delta`, then encrypted.
"""

DELTA_REACH: Final = 4
"""Number of newest policy versions that each node keeps. A delta may be encoded against any of them."""


class ManifestFile(BaseModel):
    """One file of the artefact, with its size and hash."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: Annotated[str, Field(min_length=1, max_length=255)]
    size_bytes: Annotated[int, Field(ge=0, le=2**53)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or "\\" in value or ":" in value or str(path) != value:
            raise ValueError("a file's path must stay inside the artefact")
        if not value.isprintable() or not all(map(is_portable_name, path.parts)):
            raise ValueError("a file's path must be printable and portable between operating systems")
        if path.suffix not in ALLOWED_SUFFIXES:
            raise ValueError(f"a file's suffix must be one of {', '.join(sorted(ALLOWED_SUFFIXES))}")
        return value


class Manifest(BaseModel):
    """The document that the hub signs: an artefact's files, and the carrier that transports them.

    A carrier is a directory of encrypted files (`echo_shared.artefacts.sealing`) with its own torrent. One policy
    version may have two carriers: a delta against an earlier version, and a keyframe, which needs no other version.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[2] = 2
    kind: Literal["base", "policy"]
    run_id: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
    policy_version: Annotated[int, Field(ge=0)]
    """Policy version of the artefact; 0 for the base model."""
    parent: int | None = None
    """Policy version from which this version was trained."""
    carrier: Literal["files", "gguf", "keyframe", "delta"]
    """Form of the encrypted files. files: each file is encrypted separately. gguf: the same, but the base model is one
    GGUF file for llama.cpp. keyframe and delta: all files are in one payload (`echo_shared.delta`), encoded alone or
    against an earlier version.
    """
    delta_parent: Annotated[int, Field(ge=0)] | None = None
    """Version against which the carrier's delta is encoded (its parent); None if the carrier (encrypted files) holds no
    delta.
    """
    key_id: Annotated[int, Field(ge=0)]
    """Id of the run key (a key that all nodes of the run share) with which the carrier's files are encrypted."""
    info_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    files: Annotated[tuple[ManifestFile, ...], Field(min_length=1, max_length=4_096)]
    """Files of the artefact itself, not of its carrier (the encrypted files that nodes fetch)."""
    source: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?@[0-9a-f]{40}$", max_length=256)] | None = None
    """Repository id and revision (ID@COMMIT) of the base model on the public model hub. Nodes may download the same
    files from there.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        if (self.carrier == "delta") != (self.delta_parent is not None):
            raise ValueError("a delta must name its parent, and other carriers must not")
        if self.in_files != (self.kind == "base"):
            raise ValueError("a base travels as separate files, a policy version as one payload")
        if len({file.path.casefold() for file in self.files}) < len(self.files):
            raise ValueError("two files have the same name")
        return self

    @property
    def in_files(self) -> bool:
        """True if each file is encrypted separately; False if all are in one payload."""
        return self.carrier in ("files", "gguf")

    @property
    def carrier_name(self) -> str:
        suffixes = {"files": ".s", "gguf": ".g", "keyframe": ".k", "delta": f".d{self.delta_parent}"}
        return self.name + suffixes[self.carrier]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def content(self) -> str:
        """SHA-256 of the artefact's name, file names, sizes and hashes (64 hex digits). The hash does not depend on the
        carrier: a keyframe and a delta of one artefact have the same content hash.
        """
        return content_of(self.name, self.files)

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


def artefact_name(kind: Literal["base", "policy"], run_id: str, policy_version: int) -> str:
    """Return the artefact's directory name, which is unique across runs."""
    safe_run = re.sub(r"[^A-Za-z0-9_-]", "-", run_id)
    return f"{safe_run}-base" if kind == "base" else f"{safe_run}-v{policy_version:06d}"


def content_of(name: str, files: Iterable[ManifestFile]) -> str:
    parts = [name, *(f"{file.path}\n{file.size_bytes}\n{file.sha256}" for file in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_offer(offer: ArtefactOffer, hub_key: bytes) -> Manifest:
    """Return the manifest in `offer`. Raises RemoteProtocolError if the manifest is malformed or not signed by
    `hub_key`.
    """
    if not identity.verify(hub_key, offer.signature, offer.manifest):
        raise RemoteProtocolError("A manifest is not signed by the hub.", got=f"{len(offer.manifest)} bytes")
    try:
        return Manifest.model_validate_json(offer.manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CodecError("A manifest is not valid.", got=f"{first['loc']}: {first['msg']}") from error


def sign_offer(manifest: Manifest, *, hub: Identity, torrent: bytes, web_seed_path: str) -> ArtefactOffer:
    """Sign `manifest` and return its offer, with an empty list of peers."""
    encoded = manifest.encode()
    return ArtefactOffer(
        manifest=encoded,
        signature=hub.sign(encoded),
        torrent=torrent,
        web_seed_path=web_seed_path,
        delta_parent=manifest.delta_parent,
    )


def verify_hashes(manifest: Manifest, hashes: Mapping[str, str]) -> None:
    """Raise SwarmError unless `hashes` (file path -> SHA-256 in hexadecimal) has the manifest's hash for every file."""
    for file in manifest.files:
        if hashes.get(file.path) != file.sha256:
            raise SwarmError(
                "A file of an artefact is missing or differs from the one that the hub signed.",
                got=f"{file.path} of {manifest.name}",
                do="It is fetched again automatically; if this repeats, tell the hub's operator.",
            )
