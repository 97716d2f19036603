"""The engines and the precisions that nodes may say they have: what nobody knows, nobody could judge.

A hub refuses others, so a new one is added here, and to how the hub judges it (`echo_hub.core.trust.numerics`).
"""

from __future__ import annotations

from typing import Final

BACKENDS: Final = ("llama_cpp", "mlx", "torch", "vllm", "none")
"""none: a node's owner asks for its receipts, and offers no engine."""
PRECISIONS: Final = ("", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m")
"""Of an engine's weights; empty = no engine is up, or a base model came in a format of its own."""


def known_backend(name: str) -> str:
    """Return the name. Raises ValueError for one that is not in BACKENDS."""
    return _known(name, BACKENDS, "engine")


def known_precision(name: str) -> str:
    """Return the name. Raises ValueError for one that is not in PRECISIONS."""
    return _known(name, PRECISIONS, "precision")


def _known(name: str, known: tuple[str, ...], what: str) -> str:
    if name not in known:
        names = ", ".join(filter(None, known))
        raise ValueError(f"this {what} is not known here, but {names}: upgrade the older one of node and hub")
    return name
