"""Description of a base model for llama.cpp: metadata, tensors, and the limits of exact computation.

Each family of models is a subclass of `Family`; an instance describes one model. The base class is a plain transformer:
queries, keys and values in separate layers, a gated MLP, rotary embeddings in halves, full attention. Subclasses say
where their family differs, by the conventions of llama.cpp's loaders and of its published converter. `problems` names
the differences between llama.cpp's computation and that of transformers; a model with a problem is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import gguf

from echo_shared.gguf.parts import Part, adjacent_pairs, layer_of
from echo_shared.gguf.rope import PLAIN, read_ropes

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LINEAR: Final = "linear_attention"
CONVOLUTION: Final = "conv"
MOST_LAYERS: Final = 512
"""Largest number of layers that llama.cpp allows. The check keeps a damaged configuration from making a list of 2**32
layers.
"""


class Family:
    """A model of one family. Raises KeyError, TypeError or ValueError if its configuration is damaged."""

    arch: ClassVar[gguf.MODEL_ARCH]
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of transformers' configuration class that published configurations may omit."""
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    default_theta: ClassVar[float] = 10_000.0
    sliding_theta: ClassVar[float | None] = None
    """Base of the rotary embeddings of sliding-window layers in older configurations; None: all layers have the same
    base.
    """
    rope_kinds: ClassVar[frozenset[str]] = frozenset({PLAIN, "linear", "yarn"})
    """Kinds of rotary embeddings that this architecture computes."""
    rotates_pairs: ClassVar[bool] = False
    """True: rotary embeddings rotate adjacent values in llama.cpp, but a head's two halves in transformers. The
    converter then reorders the rows of the layers q and k.
    """
    rotates_partly: ClassVar[bool] = False
    """True: for this architecture, llama.cpp can apply rotary embeddings to a part of each head's values only."""
    is_square: ClassVar[bool] = False
    """True: all heads together must have as many values as the hidden state has."""
    rounds_activations: ClassVar[bool] = False
    """True: llama.cpp computes the MLP's activation in 16 bits, whatever the precision of the weights."""
    slides: ClassVar[bool] = False
    """True: llama.cpp computes attention windows. False: llama.cpp ignores attention windows, so the model is exact
    only up to the window's length.
    """
    needs_output: ClassVar[bool] = False
    """True: llama.cpp needs an output matrix in the file, even if the matrix equals the embedding."""
    biased: ClassVar[frozenset[str]] = frozenset({"q_proj", "k_proj", "v_proj"})
    """Layers whose bias llama.cpp loads, by the last part of their names."""
    fixed: ClassVar[Mapping[str, str]] = {}
    """Layers that no adapter may change: the last part of the layer's name -> the reason."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        config = {**self.defaults, **given}
        self.config: Mapping[str, Any] = config
        self.num_layers: int = config["num_hidden_layers"]
        if not 0 < self.num_layers <= MOST_LAYERS:
            raise ValueError(f"{self.num_layers} layers; llama.cpp has at most {MOST_LAYERS}")
        self.hidden_size: int = config["hidden_size"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        self.head_dim: int = config.get("head_dim") or self.hidden_size // self.num_heads
        self.vocab_size: int = config["vocab_size"]
        self.tied_embeddings = bool(config.get("tie_word_embeddings", False))
        self.context_length: int = config["max_position_embeddings"]
        self.rope, self.sliding_rope = read_ropes(
            config,
            head_dim=self.rotated_head_dim,
            default_theta=self.default_theta,
            sliding_theta=self.sliding_theta,
        )
        self.layer_types: tuple[str, ...] = tuple(self.read_layer_types())
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_layers} layers")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Family:
        """Return the description of the model with this configuration (config.json of transformers)."""
        return cls(given)

    @property
    def rotated_head_dim(self) -> int:
        return self.head_dim

    @property
    def intermediate_size(self) -> int:
        size: int = self.config["intermediate_size"]
        return size

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts in each layer that has experts; 0: the model has none."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        return next((self.config[name] for name in names if self.config.get(name)), 0)

    def read_layer_types(self) -> Iterator[str]:
        """Yield each layer's kind: FULL, SLIDING, LINEAR or CONVOLUTION."""
        yield from self.config.get("layer_types") or [FULL] * self.num_layers

    @property
    def window(self) -> int | None:
        """Return the length of the attention window of sliding layers, None if no layer slides."""
        window: int | None = self.config.get("sliding_window")
        return window if SLIDING in self.layer_types else None

    @property
    def max_positions(self) -> int:
        """Return the largest number of tokens of a text for which llama.cpp and transformers compute the same
        values.
        """
        limits = [self.context_length]
        if not self.slides and self.window is not None:
            limits.append(self.window)
        if self.rope.kind == "longrope":
            limits.append(self.rope.original_positions)  # For longer texts, transformers uses other factors.
        return min(limits)

    @property
    def kv_values_per_token(self) -> int:
        """Return how many numbers the KV cache (keys and values of all layers) holds for one token."""
        num_attending = sum(kind in {FULL, SLIDING} for kind in self.layer_types)
        return 2 * num_attending * self.num_kv_heads * self.head_dim

    @property
    def state_values(self) -> int:
        """Return how many numbers the layers with a state of constant size (instead of a KV cache) hold for one
        sequence of any length.
        """
        return 0

    def problems(self) -> Iterator[str]:
        """Yield a text for each part of the model that llama.cpp computes differently from transformers. A model with
        such a part is refused.
        """
        activation = self.config.get("hidden_act") or self.config.get("hidden_activation") or self.activations[0]
        if activation not in self.activations:
            yield f"hidden_act {activation}"
        if self.is_square and self.num_heads * self.head_dim != self.hidden_size:
            yield f"{self.num_heads} heads of {self.head_dim} values, and a hidden state of {self.hidden_size}"
        if self.kv_values_per_token == 0:
            yield "no layer with attention"
        yield from self._rope_problems()

    def _rope_problems(self) -> Iterator[str]:
        if self.rope.kind not in self.rope_kinds:
            yield f"rope_type {self.rope.kind}"
            return
        if not self.rotates_partly and self.rope.dims != self.rotated_head_dim:
            yield f"rotary embeddings of {self.rope.dims} of {self.rotated_head_dim} values"
        yield from self.rope.problems()

    def parts(self, name: str) -> tuple[Part, ...]:
        """Return the tensors of llama.cpp that are made from the transformers tensor `name`. Empty: llama.cpp does not
        need it.
        """
        heads = {"q_proj": self.num_heads, "k_proj": self.num_kv_heads}.get(layer_of(name))
        if heads is None or not self.rotates_pairs:
            return (Part(name=name),)
        return (Part(name=name, rows=adjacent_pairs(heads, self.head_dim)),)

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Write the model's sizes as metadata. Keep the order of the keys: another order changes the file's hash."""
        writer.add_block_count(self.num_layers)
        writer.add_context_length(self.context_length)
        writer.add_embedding_length(self.hidden_size)
        writer.add_feed_forward_length(self.intermediate_size)
        writer.add_head_count(self.num_heads)
        self.add_head_sizes(writer)
        writer.add_rope_dimension_count(self.rope.dims)
        writer.add_rope_freq_base(self.rope.theta)
        self.add_norm_eps(writer)
        writer.add_vocab_size(self.vocab_size)

    def add_head_sizes(self, writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(self.num_kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)

    def add_norm_eps(self, writer: gguf.GGUFWriter) -> None:
        writer.add_layer_norm_rms_eps(self.config["rms_norm_eps"])

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        """Write the metadata of this family only. It follows the metadata common to all families."""
        self.rope.add_metadata(writer, self.attention_factor())

    def attention_factor(self) -> float:
        """Return the factor by which rotated queries and keys must be multiplied, beyond the factor that llama.cpp
        applies.
        """
        return self.rope.attention_factor(self.context_length)

    def add_windows(self, writer: gguf.GGUFWriter) -> None:
        """If the model has layers with sliding-window attention, write the window and those layers."""
        if self.window is not None:
            writer.add_sliding_window(self.window)
            writer.add_sliding_window_pattern([kind == SLIDING for kind in self.layer_types])

    def add_experts(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(self.num_experts)
        writer.add_expert_used_count(self.config["num_experts_per_tok"])
