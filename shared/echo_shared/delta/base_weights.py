"""The weight files of a base model, and the errors for a model without weights or one that a backend cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo_shared.errors import BackendError
from echo_shared.installation import how_to_install

NO_WEIGHTS: Final = "no_weights"
"""Code of the BackendError for a base model without safetensors files."""


def weights_of(base_dir: Path) -> list[Path]:
    """Return the base model's safetensors files, in order. Raises BackendError with the code NO_WEIGHTS if there are
    none.
    """
    found = sorted(base_dir.glob("*.safetensors"))
    if not found:
        raise BackendError(
            "The base model's weights are not here as safetensors.",
            got=str(base_dir),
            do="A node that runs with this engine fetches them again. For a GGUF file, use llama_cpp.",
            code=NO_WEIGHTS,
        )
    return found


def unsupported_model(got: str) -> BackendError:
    return BackendError(
        "This backend cannot run the base model.",
        got=got,
        do=f"Run this node with the torch backend: {how_to_install('cuda')}, then: echo-node run --backend torch",
        code="unsupported_model",
    )
