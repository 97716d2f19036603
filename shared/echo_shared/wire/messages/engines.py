"""Names of the engines and precisions that a node may report.

The hub refuses other names: their engines have no defined error limits. A new engine needs its name here and its limits
in `echo_hub.core.trust.numerics`.
"""

from __future__ import annotations

from typing import Final

BACKENDS: Final = ("llama_cpp", "mlx", "torch", "vllm", "none")
"""Names of engines (backends). none: the node runs no engine and only asks for its owner's receipts."""
PRECISIONS: Final = ("", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m")
"""Precision of an engine's weights. "": no engine runs, or the base model's format has no defined precision."""


def known_backend(name: str) -> str:
    return _known(name, BACKENDS, "engine")


def known_precision(name: str) -> str:
    return _known(name, PRECISIONS, "precision")


def _known(name: str, known: tuple[str, ...], what: str) -> str:
    if name not in known:
        names = ", ".join(filter(None, known))
        raise ValueError(f"this {what} is unknown here (known: {names}): upgrade the older of node and hub")
    return name
