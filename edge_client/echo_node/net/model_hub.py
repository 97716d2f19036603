"""Downloads a base model from a model hub (huggingface.co, or HF_ENDPOINT), by id and revision.

The signed manifest lists the files, and each file's hash is checked. The engines that use transformers install the
needed library; a node without it uses the swarm. The owner's token is not sent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo_shared.artefacts.hashed_files import verify_files
from echo_shared.artefacts.manifest import Manifest
from echo_shared.errors import SwarmError


def download(manifest: Manifest, directory: Path, on_bytes: Callable[[int], None]) -> None:
    """Download the manifest's files into `directory`. Complete files of an earlier call stay. Blocks the calling
    thread.

    `on_bytes` gets the number of new bytes; an exception from it ends the download. Raises SwarmError if a file is
    unavailable, or if the files differ from what the hub has signed; the files are then deleted. A download ends once
    it has more bytes than the signed files.
    """
    source, _, revision = (manifest.source or "").partition("@")
    left_bytes = manifest.total_bytes
    try:
        from huggingface_hub import hf_hub_download

        # HTTPError is the error class of the HTTP client that huggingface_hub uses. mypy does not find the two names,
        # because the modules import them without exporting them.
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]
    except ImportError as error:
        raise SwarmError(f"{source} cannot be fetched from its model hub.", got=str(error)) from error

    class Bar(tqdm):
        """Reports received bytes instead of drawing a bar."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal left_bytes
            left_bytes -= int(n or 0)
            if left_bytes < 0:
                raise SwarmError(f"{source} has larger files than the hub has signed.", got=str(directory))
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
