"""Names of the engines and precisions that a node may report.

The hub refuses other names: their engines have no defined error limits. A new engine needs its name here and its limits
in `echo_hub.core.trust.numerics`.
"""

from __future__ import annotations

import re
from typing import Final

BACKENDS: Final = ("llama_cpp", "mlx", "torch", "vllm", "none")
"""Names of engines (backends). none: the node runs no engine and only asks for its owner's receipts."""
PRECISIONS: Final = ("", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m")
"""Precision of an engine's weights. "": no engine runs, or the base model's format has no defined precision.

An engine that reads the GGUF file of its hub reports `precision_of_file` instead, because the file's weights need not
be those that the node would get by converting the base model.
"""
_FILE: Final = re.compile(r"([a-z][a-z0-9_]{1,15})@([0-9a-f]{8})")
_ID_DIGITS: Final = 8


def known_backend(name: str) -> str:
    return _known(name, BACKENDS, "engine")


def known_precision(name: str) -> str:
    return name if _FILE.fullmatch(name) else _known(name, PRECISIONS, "precision")


def precision_of_file(weights: str, content: str) -> str:
    """Return the precision of an engine that reads the hub's GGUF file, such as q4_1@3fa94c2e.

    `weights`: type of the file's weights. `content`: content id of the artefact with the file, in hexadecimal.
    """
    return f"{weights}@{content[:_ID_DIGITS]}"


def weights_of_file(precision: str) -> str | None:
    """Return the type of the weights if the engine reads the hub's GGUF file, else None."""
    found = _FILE.fullmatch(precision)
    return None if found is None else found[1]


def precision_in_words(precision: str) -> str:
    """Return the precision in words for people."""
    weights = weights_of_file(precision)
    return precision if weights is None else f"{weights} (the hub's file)"


def _known(name: str, known: tuple[str, ...], what: str) -> str:
    if name not in known:
        names = ", ".join(filter(None, known))
        raise ValueError(f"this {what} is unknown here (known: {names}): upgrade the older of node and hub")
    return name
