"""A base model from a model hub (huggingface.co, or where HF_ENDPOINT points), by id and revision.

Another way to the very files of the signed manifest, nothing more: each is checked against its hash. The library comes
with the engines that are built on transformers; a node without it takes the swarm. The owner's token is not sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo_shared.artefacts import Manifest
from echo_shared.errors import SwarmError
from echo_shared.hashed_files import verify_files


def download(manifest: Manifest, directory: Path, on_bytes: Callable[[int], None]) -> None:
    """Brings the manifest's files into `directory`; whole files that an earlier call has left there stay. Blocks.

    `on_bytes` is told how many more bytes are there; what it raises ends the download. Raises SwarmError when not all
    of it can be had, or when it is not what the hub signed; that is deleted then.
    """
    source, _, revision = (manifest.source or "").partition("@")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # Of the HTTP client that it uses.
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # Not among what it says it exports.
    except ImportError as error:
        raise SwarmError(f"{source} cannot be fetched from its model hub.", got=str(error)) from error

    class Bar(tqdm):
        """Hands on what arrives instead of drawing it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            on_bytes(int(n or 0))

    try:
        for file in manifest.files:
            hf_hub_download(source, file.path, revision=revision, local_dir=directory, token=False, tqdm_class=Bar)
    except (OSError, HTTPError, ValueError) as error:
        raise SwarmError(f"{source} cannot be fetched from its model hub.", got=str(error)) from error
    try:
        verify_files(manifest, directory)
    except SwarmError:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory / ".cache", ignore_errors=True)
