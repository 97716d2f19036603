"""File layout, signed manifest and size limits of bundles.

    OUT/manifest.json            signed by the hub's key: the run, and size and SHA-256 of every other file
    OUT/run.json                 settings without secrets, hashes of the base model's files, totals of the run
    OUT/nodes.jsonl              one line a node: pseudonym, numerics class, trust standing
    OUT/steps.jsonl              one line a trained step: sizes, mean reward, times, the learner's figures
    OUT/rollouts/000001.zst      groups and their leases, by group id: `echo_hub.bundles.blocks`
    OUT/adapters/v000012/        policy versions that drew these rollouts, in PEFT's layout, as nodes got them
    OUT/checkpoints/step-000011/ the learner's state before a named step

Only files of these names can be in a bundle, so no path leads out of its directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo_shared.signing import signed_document
from echo_shared.signing.identity import Identity
from echo_shared.signing.signed_document import Moment, Signed

MANIFEST: Final = "manifest.json"
RUN: Final = "run.json"
NODES: Final = "nodes.jsonl"
STEPS: Final = "steps.jsonl"
ROLLOUTS: Final = "rollouts"
ADAPTERS: Final = "adapters"
CHECKPOINTS: Final = "checkpoints"
MANIFEST_BYTES: Final = 64 << 20
RUN_BYTES: Final = 16 << 20
LINE_BYTES: Final = 1 << 20
"""Longest line of a .jsonl file."""
BLOCK_BYTES: Final = 64 << 20
"""Largest file of rollouts, compressed or not."""
MOST_FILES: Final = 100_000
_PREFIX: Final = b"echo bundle 1\0"
_PATHS: Final = (
    r"^(run\.json|nodes\.jsonl|steps\.jsonl|rollouts/\d{6}\.zst"
    r"|adapters/v\d{6,12}/adapter_(model\.safetensors|config\.json)"
    r"|checkpoints/step-\d{6,12}/(adapter_model\.safetensors|adapter_config\.json|optimizer\.safetensors|checkpoint\.json))$"
)


class BundleFile(BaseModel):
    """One file of a bundle, with size and hash."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    path: Annotated[str, Field(pattern=_PATHS)]
    size_bytes: Annotated[int, Field(ge=0, le=1 << 40)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BundleManifest(Signed):
    """The document that the hub signs."""

    format: Literal[1] = 1
    run_id: Annotated[str, Field(max_length=64)]
    run_name: Annotated[str, Field(max_length=64)]
    made_at: Moment
    software: Annotated[str, Field(max_length=64)]
    """Version of the Echo software that made the bundle."""
    files: Annotated[tuple[BundleFile, ...], Field(max_length=MOST_FILES)]


def sign(said: BundleManifest, hub: Identity) -> bytes:
    """Return the signed manifest as JSON."""
    return signed_document.sign(said, hub, name="bundle", prefix=_PREFIX)


def verified(document: bytes) -> BundleManifest:
    """Return the manifest after checking its signature. Raises CodecError for a wrong signature."""
    return signed_document.verified(
        document, BundleManifest, name="bundle", prefix=_PREFIX, what="bundle's manifest", most_bytes=MANIFEST_BYTES
    )


def block_path(number: int) -> str:
    return f"{ROLLOUTS}/{number:06d}.zst"


def adapter_path(policy_version: int) -> str:
    return f"{ADAPTERS}/v{policy_version:06d}"


def checkpoint_path(step: int) -> str:
    return f"{CHECKPOINTS}/step-{step:06d}"


def version_of(directory: Path) -> int:
    """Return the number at the end of an adapter's or a checkpoint's directory name."""
    return int(directory.name.removeprefix("step-").removeprefix("v"))
