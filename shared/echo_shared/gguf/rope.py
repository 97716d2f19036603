"""Rotary position embeddings: from transformers' configuration to metadata and tensors of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import gguf
import numpy as np
from numpy.typing import NDArray

PLAIN: Final = "default"
_YARN_TURNS: Final = (32.0, 1.0)
"""Values of YaRN's parameters beta_fast and beta_slow in llama.cpp. Most of its architectures ignore the values in the
file.
"""
_CONTEXT_STEP: Final = 256
"""llama.cpp rounds the length of its context up to a multiple of this number."""
_NO_DIFFERENCE: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotation of queries and keys in some layers of a model."""

    theta: float
    kind: str
    """rope_type of transformers: default, linear, llama3, yarn, longrope ..."""
    dims: int
    """Number of values of each head that are rotated."""
    original_positions: int
    """Number of positions that the model supported before its context was extended."""
    options: Mapping[str, Any]
    """All parameters of the rope type, by their names in transformers."""

    @classmethod
    def read(cls, options: Mapping[str, Any], *, head_dim: int, max_positions: int) -> Self:
        return cls(
            theta=float(options["rope_theta"]),
            kind=options.get("rope_type", PLAIN),
            dims=int(head_dim * (options.get("partial_rotary_factor") or 1.0)),
            original_positions=options.get("original_max_position_embeddings") or max_positions,
            options=options,
        )

    @property
    def factor(self) -> float:
        return float(self.options.get("factor") or 1.0)

    @property
    def is_plain(self) -> bool:
        return self.kind == PLAIN

    def attention_factor(self, max_positions: int) -> float:
        """Return the factor by which rotated queries and keys must be multiplied, beyond the factor that llama.cpp
        applies.
        """
        given = self.options.get("attention_factor")
        if self.kind == "yarn":
            own = _yarn_scale(self.factor, 1.0)
            whole, part = self.options.get("mscale"), self.options.get("mscale_all_dim")
            if given is None and whole and part:
                given = _yarn_scale(self.factor, whole) / _yarn_scale(self.factor, part)
            return 1.0 if given is None else given / own
        if self.kind == "longrope":
            factor = self.options.get("factor") or max_positions / self.original_positions
            wanted = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original_positions))
            return wanted if given is None else float(given)
        return 1.0

    def problems(self) -> Iterator[str]:
        """Yield a text for each parameter that llama.cpp ignores in all architectures."""
        if self.kind == "longrope" and self.original_positions % _CONTEXT_STEP:
            yield f"longrope after {self.original_positions} positions, no multiple of {_CONTEXT_STEP}"
        if self.kind != "yarn":
            return
        turns = (self.options.get("beta_fast") or _YARN_TURNS[0], self.options.get("beta_slow") or _YARN_TURNS[1])
        if turns != _YARN_TURNS:
            yield f"YaRN with beta_fast {turns[0]} and beta_slow {turns[1]}, where llama.cpp has 32 and 1"
        if not self.options.get("truncate", True) and any(edge % 1 for edge in self._yarn_edges(turns)):
            yield "YaRN with truncate: false, where llama.cpp rounds the edges of its ramp"

    def _yarn_edges(self, turns: tuple[float, float]) -> tuple[float, ...]:
        """Return the ends of YaRN's ramp as indices of frequencies, as transformers' find_correction_dim computes
        them.
        """
        span = math.log(self.theta)
        edges = (self.dims * math.log(self.original_positions / (turn * 2 * math.pi)) / (2 * span) for turn in turns)
        return tuple(min(max(edge, 0.0), self.dims - 1.0) for edge in edges)

    def add_metadata(self, writer: gguf.GGUFWriter, attention_factor: float) -> None:
        """Write the metadata of a context that was extended: kind, factor and original length."""
        if self.kind in {"linear", "yarn"}:
            writer.add_rope_scaling_type(gguf.RopeScalingType(self.kind))
            writer.add_rope_scaling_factor(self.factor)
            writer.add_rope_scaling_orig_ctx_len(self.original_positions)
        if self.kind == "longrope":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(self.original_positions)
        if abs(attention_factor - 1) > _NO_DIFFERENCE:
            writer.add_rope_scaling_attn_factors(attention_factor)

    def factors(self) -> dict[str, NDArray[np.float32]]:
        """Return tensors by name. Each holds the numbers by which llama.cpp divides the rotary frequencies."""
        if self.kind == "llama3":
            return {"rope_freqs.weight": self._llama3_factors()}
        if self.kind == "longrope":
            return {
                f"rope_factors_{which}.weight": np.array(self.options[f"{which}_factor"], np.float32)
                for which in ("long", "short")
            }
        return {}

    def _llama3_factors(self) -> NDArray[np.float32]:
        # The formula is that of transformers.modeling_rope_utils ("llama3").
        exponents = np.arange(0, self.dims, 2, dtype=np.float64) / self.dims
        wavelengths = 2 * np.pi * self.theta**exponents
        low, high = self.options["low_freq_factor"], self.options["high_freq_factor"]
        smooth = np.clip((self.original_positions / wavelengths - low) / (high - low), 0.0, 1.0)
        divisors: NDArray[np.float32] = (1 / ((1 - smooth) / self.factor + smooth)).astype(np.float32)
        return divisors


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_ropes(
    config: Mapping[str, Any], *, head_dim: int, default_theta: float, sliding_theta: float | None
) -> tuple[Rope, Rope]:
    """Return the rotation of full-attention layers and of sliding-window layers, from a configuration of transformers 5
    or an older one.

    `sliding_theta`: base of sliding layers in older configurations, whose scaling applies to full attention only; None:
    both kinds of layers rotate alike.
    """
    max_positions = config["max_position_embeddings"]
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in given or "sliding_attention" in given:
        both = [dict(given.get(name) or {}) for name in ("full_attention", "sliding_attention")]
    else:
        both = [given, dict(given)]
        if sliding_theta is not None:
            both[1] = {"rope_theta": config.get("rope_local_base_freq") or sliding_theta}
    for options in both:
        # Configurations from before transformers 5 store rope base and scaling separately.
        options.setdefault("rope_theta", config.get("rope_theta") or default_theta)
        options.setdefault("rope_type", options.pop("type", PLAIN))
        if options["rope_type"] == "su":
            options["rope_type"] = "longrope"
        for key in ("partial_rotary_factor", "original_max_position_embeddings"):
            if config.get(key) is not None:
                options.setdefault(key, config[key])
    full, sliding = (Rope.read(options, head_dim=head_dim, max_positions=max_positions) for options in both)
    return full, sliding
