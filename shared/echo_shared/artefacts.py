"""Signed manifests: what an artefact (the base model, or one policy version) consists of, and that the hub says so.

A node trusts a file only when its manifest carries the pinned hub key's signature and the file has the manifest's hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from echo_shared import identity
from echo_shared.errors import CodecError, RemoteProtocolError, SwarmError
from echo_shared.file_names import is_portable_name
from echo_shared.identity import Identity
from echo_shared.messages import ArtefactOffer

ALLOWED_SUFFIXES: Final = frozenset({".safetensors", ".json", ".gguf", ".txt", ".model", ".jinja"})
"""Weights travel as safetensors or GGUF, the rest as plain text; nothing that could run code."""
SEALED_SUFFIX: Final = ".sealed"
"""Of a sealed file, behind its name in the artefact."""
PAYLOAD_NAME: Final = "payload" + SEALED_SUFFIX
"""The one file of a keyframe's or a delta's carrier: what `echo_shared.delta` makes of the artefact's files, sealed."""

DELTA_REACH: Final = 4
"""Newest policy versions that every node keeps: a delta's parent is one of them."""


class ManifestFile(BaseModel):
    """One file of the artefact."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: Annotated[str, Field(min_length=1, max_length=255)]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or "\\" in value or ":" in value or str(path) != value:
            raise ValueError("a file's path must stay inside the artefact")
        if not value.isprintable() or not all(map(is_portable_name, path.parts)):
            raise ValueError("a file's path must be printable, and possible on every system")
        if path.suffix not in ALLOWED_SUFFIXES:
            raise ValueError(f"a file must be one of {', '.join(sorted(ALLOWED_SUFFIXES))}")
        return value


class Manifest(BaseModel):
    """What the hub signs: the artefact's files, and the carrier that they travel in.

    The carrier is a directory of sealed files (`echo_shared.sealing`), and what the torrent describes. One version may
    have two: a delta against an earlier version, and a keyframe, which takes none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[2] = 2
    kind: Literal["base", "policy"]
    run_id: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
    policy_version: Annotated[int, Field(ge=0)]
    """0 for the base model."""
    parent: int | None = None
    """The version this one was trained from."""
    carrier: Literal["files", "keyframe", "delta"]
    """files: each file sealed as it is. keyframe and delta: all of them in one payload (`echo_shared.delta`)."""
    delta_parent: Annotated[int, Field(ge=0)] | None = None
    """The version that a delta is against; None for a carrier that takes none."""
    key_id: Annotated[int, Field(ge=0)]
    """The run key that the carrier is sealed with."""
    info_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    """Of the carrier's torrent."""
    files: Annotated[tuple[ManifestFile, ...], Field(min_length=1, max_length=4_096)]
    """Of the artefact itself, not of its carrier."""
    source: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?@[0-9a-f]{40}$", max_length=256)] | None = None
    """The base model's id and revision on the model hub, where these very files can be had as well."""

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        if (self.carrier == "delta") != (self.delta_parent is not None):
            raise ValueError("a delta, and nothing else, names its parent")
        if (self.carrier == "files") != (self.kind == "base"):
            raise ValueError("a base travels as its files, a policy version as one payload")
        if len({file.path.casefold() for file in self.files}) < len(self.files):
            raise ValueError("two files of one name")
        return self

    @property
    def carrier_name(self) -> str:
        """The directory of the sealed files: for a base all of `files` with `SEALED_SUFFIX`, else `PAYLOAD_NAME`."""
        suffixes = {"files": ".s", "keyframe": ".k", "delta": f".d{self.delta_parent}"}
        return self.name + suffixes[self.carrier]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def content(self) -> str:
        """Names the artefact by its files and their hashes (64 hex digits), whatever it was carried and sealed by."""
        return content_of(self.name, self.files)

    def encode(self) -> bytes:
        """The bytes that are signed."""
        return self.model_dump_json().encode()


def artefact_name(kind: Literal["base", "policy"], run_id: str, policy_version: int) -> str:
    """The artefact's directory: unique among all runs that a node may ever join."""
    safe_run = re.sub(r"[^A-Za-z0-9_-]", "-", run_id)
    return f"{safe_run}-base" if kind == "base" else f"{safe_run}-v{policy_version:06d}"


def content_of(name: str, files: Iterable[ManifestFile]) -> str:
    """`Manifest.content` of these files under this name."""
    parts = [name, *(f"{file.path}\n{file.size_bytes}\n{file.sha256}" for file in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_offer(offer: ArtefactOffer, hub_key: bytes) -> Manifest:
    """The manifest in `offer`. Raises RemoteProtocolError unless `hub_key` has signed it and it is well-formed."""
    if not identity.verify(hub_key, offer.signature, offer.manifest):
        raise RemoteProtocolError("A manifest is not signed by the hub.", got=f"{len(offer.manifest)} bytes")
    try:
        return Manifest.model_validate_json(offer.manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CodecError("A manifest is not valid.", got=f"{first['loc']}: {first['msg']}") from error


def sign_offer(manifest: Manifest, *, hub: Identity, torrent: bytes, web_seed_path: str) -> ArtefactOffer:
    """The offer that announces `manifest`; it names no peers yet."""
    encoded = manifest.encode()
    return ArtefactOffer(
        manifest=encoded,
        signature=hub.sign(encoded),
        torrent=torrent,
        web_seed_path=web_seed_path,
        delta_parent=manifest.delta_parent,
    )


def verify_hashes(manifest: Manifest, hashes: Mapping[str, str]) -> None:
    """Raises SwarmError unless the files of `manifest` have these SHA-256 hashes (hexadecimal), by their paths."""
    for file in manifest.files:
        if hashes.get(file.path) != file.sha256:
            raise SwarmError(
                "A file of an artefact is missing or not what the hub signed.",
                got=f"{file.path} of {manifest.name}",
                do="It is fetched again by itself; if this repeats, tell the hub's operator.",
            )
