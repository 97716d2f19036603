"""Families of models in which some layers keep a state of constant size, instead of keys and values of every token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import gguf
import numpy as np

from echo_shared.gguf.family import CONVOLUTION, FULL, LINEAR, Family
from echo_shared.gguf.parts import (
    Array,
    Order,
    Part,
    layer_of,
    negative_exponential,
    plus_one,
    tiled,
    without_channels,
)


class GatedDelta(Family):
    """Models in which three of four layers are gated delta networks. The other layers have gated attention; q_proj
    computes the gate, too.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    rotates_partly = True

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.key_heads: int = self.config["linear_num_key_heads"]
        self.value_heads: int = self.config["linear_num_value_heads"]
        self.state_dim: int = self.config["linear_key_head_dim"]
        self.heads_per_key: int = self.value_heads // self.key_heads
        self.key_size: int = self.key_heads * self.state_dim
        self.value_size: int = self.value_heads * self.state_dim

    def read_layer_types(self) -> Iterator[str]:
        every = self.config["full_attention_interval"]
        kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(self.num_layers)]
        yield from self.config.get("layer_types") or kinds

    @property
    def state_values(self) -> int:
        convolved: int = (self.config["linear_conv_kernel_dim"] - 1) * (2 * self.key_size + self.value_size)
        return self.layer_types.count(LINEAR) * (convolved + self.state_dim * self.value_size)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config["linear_value_head_dim"] != self.state_dim:
            yield f"linear_value_head_dim other than linear_key_head_dim, {self.state_dim}"
        # llama.cpp also normalises keys and queries with rms_norm_eps; transformers always takes 1e-6.
        if self.config["rms_norm_eps"] != 1e-6:
            yield f"rms_norm_eps {self.config['rms_norm_eps']} instead of 1e-6"
        if self.value_heads % self.key_heads:
            yield f"{self.value_heads} value heads for {self.key_heads} key heads"

    def parts(self, name: str) -> tuple[Part, ...]:
        if name.startswith("mtp."):
            return ()  # Leave out the tensors of multi-token prediction, as transformers does.
        if name.endswith(".A_log"):
            return (Part(name=name, value=negative_exponential),)
        if name.endswith(".dt_bias"):
            return (Part(name=f"{name.removesuffix('.dt_bias')}.dt_proj.bias"),)
        if layer_of(name) == "conv1d":
            return (Part(name=name, value=without_channels),)
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return (Part(name=name, value=plus_one),)
        return super().parts(name)

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        writer.add_ssm_conv_kernel(self.config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.key_heads)
        writer.add_ssm_time_step_rank(self.value_heads)
        writer.add_ssm_inner_size(self.value_size)
        recurrent = [kind == LINEAR for kind in self.layer_types]
        writer.add_array(f"{gguf.MODEL_ARCH_NAMES[self.arch]}.attention.recurrent_layers", recurrent)


class Qwen3Next(GatedDelta):
    arch = gguf.MODEL_ARCH.QWEN3NEXT
    defaults: ClassVar[Mapping[str, Any]] = {**GatedDelta.defaults, "norm_topk_prob": True, "decoder_sparse_step": 1}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.config["norm_topk_prob"]:
            yield "norm_topk_prob: false, where llama.cpp normalises the weights of the chosen experts"
        if self.config["decoder_sparse_step"] != 1 or self.config.get("mlp_only_layers"):
            yield "layers without experts"

    def parts(self, name: str) -> tuple[Part, ...]:
        if layer_of(name) == "shared_expert_gate":
            return (Part(name=name, value=np.ravel),)
        if layer_of(name) != "in_proj_qkvz":
            return super().parts(name)
        # The rows are sorted by key head. Each key head has a query, a key, and its values and gates.
        widths = [self.state_dim, self.state_dim, *[self.heads_per_key * self.state_dim] * 2]
        by_head = np.arange(self.key_heads * sum(widths)).reshape(self.key_heads, -1)
        query, key, value, gate = np.split(by_head, np.cumsum(widths)[:-1], axis=1)
        joined = np.concatenate([query.reshape(-1), key.reshape(-1), value.reshape(-1)])
        layer = name.removesuffix(".in_proj_qkvz.weight")
        return (
            Part(name=f"{layer}.in_proj_qkv.weight", rows=joined),
            Part(name=f"{layer}.in_proj_z.weight", rows=gate.reshape(-1)),
        )

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_experts(writer)
        writer.add_expert_feed_forward_length(self.config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(self.config["shared_expert_intermediate_size"])


class Qwen35(GatedDelta):
    """Qwen 3.5. llama.cpp sorts value heads by their number within the key head, so that it can repeat all keys in one
    operation.
    """

    arch = gguf.MODEL_ARCH.QWEN35
    sections: ClassVar[tuple[int, ...]] = (11, 11, 10)
    """Numbers of rotary frequencies for time, height and width of an image. In text, all three coordinates equal the
    token's position.
    """

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(self._sections()) > 3 or sum(self._sections()) < self.rope.dims // 2:
            yield f"mrope_section {list(self._sections())} for {self.rope.dims} rotated values"

    def _sections(self) -> tuple[int, ...]:
        return tuple(self.rope.options.get("mrope_section") or self.sections)

    def parts(self, name: str) -> tuple[Part, ...]:
        values = self._tiled(self.state_dim)
        behind_keys = np.concatenate([np.arange(2 * self.key_size), 2 * self.key_size + values])
        parts = super().parts(name)
        if not parts:
            return ()
        (part,) = parts
        match "conv1d" if layer_of(name) == "conv1d" else name.rpartition("linear_attn.")[2]:
            case "in_proj_qkv.weight" | "conv1d":
                return (Part(name=part.name, rows=behind_keys, value=part.value),)
            case "in_proj_z.weight":
                return (Part(name=part.name, rows=values),)
            case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
                return (Part(name=part.name, rows=self._tiled(1), value=part.value),)
            case "out_proj.weight":
                return (Part(name=part.name, columns=values),)
            case _:
                return (part,)

    def _tiled(self, width: int) -> Order:
        return tiled(self.key_heads, self.heads_per_key, width)

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        sections = [*self._sections(), 0, 0, 0]
        writer.add_rope_dimension_sections(sections[:4])


class Lfm2(Family):
    """LFM2. Most layers are gated short convolutions."""

    arch = gguf.MODEL_ARCH.LFM2
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }
    default_theta = 1_000_000.0
    is_square = True

    def __init__(self, given: Mapping[str, Any]) -> None:
        tied = given.get("tie_embedding", given.get("tie_word_embeddings", True))
        super().__init__({**given, "tie_word_embeddings": tied})

    @property
    def intermediate_size(self) -> int:
        config = self.config
        size: int = config.get("block_ff_dim") or config["intermediate_size"]
        if config["block_auto_adjust_ff_dim"]:
            size = int(2 * size / 3)
            if config["block_ffn_dim_multiplier"] is not None:
                size = int(config["block_ffn_dim_multiplier"] * size)
            multiple = config["block_multiple_of"]
            size = -(-size // multiple) * multiple
        return size

    def read_layer_types(self) -> Iterator[str]:
        attending = self.config.get("full_attn_idxs") or range(self.num_layers)
        kinds = [FULL if layer in attending else CONVOLUTION for layer in range(self.num_layers)]
        yield from self.config.get("layer_types") or kinds

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config.get("conv_bias"):
            yield "conv_bias"

    @property
    def state_values(self) -> int:
        kernel: int = self.config["conv_L_cache"]
        return self.layer_types.count(CONVOLUTION) * self.hidden_size * (kernel - 1)

    def parts(self, name: str) -> tuple[Part, ...]:
        if name.endswith(".conv.conv.weight"):
            return (Part(name=name, value=without_channels),)
        return super().parts(name)

    def add_head_sizes(self, writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv([self.num_kv_heads if kind == FULL else 0 for kind in self.layer_types])
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)

    def add_norm_eps(self, writer: gguf.GGUFWriter) -> None:
        writer.add_layer_norm_rms_eps(self.config["norm_eps"])

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        writer.add_shortconv_l_cache(self.config["conv_L_cache"])


class GraniteHybrid(Family):
    """Granite 4. Most layers are Mamba 2. One layer computes gate and up; its name says "shared" even if the model has
    no experts.
    """

    arch = gguf.MODEL_ARCH.GRANITE_HYBRID
    defaults: ClassVar[Mapping[str, Any]] = {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "time_step_limit": (0.0, math.inf),
    }
    rope_kinds = Family.rope_kinds | {"llama3"}
    rotates_pairs = True
    biased = Family.biased | {"o_proj", "conv1d"}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Family:
        hybrid = cls(given)
        return hybrid if LINEAR in hybrid.layer_types else GraniteAttention(given)

    @property
    def intermediate_size(self) -> int:
        size: int = self.config["intermediate_size" if self.num_experts else "shared_intermediate_size"]
        return size

    @property
    def inner_size(self) -> int:
        """Return the number of values of all heads of a Mamba layer together."""
        size: int = self.config["mamba_expand"] * self.hidden_size
        return size

    def read_layer_types(self) -> Iterator[str]:
        given = self.config.get("layer_types") or [LINEAR] * self.num_layers
        yield from ({"mamba": LINEAR, "attention": FULL}.get(kind, kind) for kind in given)

    @property
    def state_values(self) -> int:
        mixed: int = self.inner_size + 2 * self.config["mamba_n_groups"] * self.config["mamba_d_state"]
        state: int = self.config["mamba_d_state"] * self.inner_size
        convolved: int = (self.config["mamba_d_conv"] - 1) * mixed
        return self.layer_types.count(LINEAR) * (convolved + state)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config["mamba_expand"] != 2:
            yield f"mamba_expand {self.config['mamba_expand']} instead of 2"
        if self.config.get("mamba_proj_bias"):
            yield "mamba_proj_bias"
        low, high = map(_number, self.config["time_step_limit"])
        if low > 0 or high < math.inf:
            yield f"time_step_limit {low} to {high}"

    def parts(self, name: str) -> tuple[Part, ...]:
        if name.endswith(".A_log"):
            return (Part(name=name, value=lambda array: negative_exponential(array)[:, None]),)
        if name.endswith(".mamba.D"):
            return (Part(name=name, value=lambda array: array[:, None]),)
        if name.endswith(".dt_bias"):
            return (Part(name=f"{name.removesuffix('.dt_bias')}.dt_proj.bias"),)
        if name.endswith(".mamba.norm.weight"):
            return (Part(name=name, value=self._by_group),)
        if name.endswith(".mamba.conv1d.weight"):
            return (Part(name=name, value=without_channels),)
        return self._mlp_parts(name) or super().parts(name)

    def _by_group(self, array: Array) -> Array:
        return array.reshape(self.config["mamba_n_groups"], -1)

    def _mlp_parts(self, name: str) -> tuple[Part, ...]:
        layer, _, rest = name.partition(".shared_mlp.")
        mlp = f"{layer}.mlp.shared_expert" if self.num_experts else f"{layer}.mlp"
        if rest == "input_linear.weight":
            gate = np.arange(self.config["shared_intermediate_size"])
            return (
                Part(name=f"{mlp}.gate_proj.weight", rows=gate),
                Part(name=f"{mlp}.up_proj.weight", rows=len(gate) + gate),
            )
        if rest == "output_linear.weight":
            return (Part(name=f"{mlp}.down_proj.weight"),)
        if name.endswith(".block_sparse_moe.input_linear.weight"):
            experts = f"{name.removesuffix('.block_sparse_moe.input_linear.weight')}.mlp.experts"
            size = self.intermediate_size
            return (
                Part(name=f"{experts}.gate_proj.weight", value=lambda array: array[:, :size]),
                Part(name=f"{experts}.up_proj.weight", value=lambda array: array[:, size:]),
            )
        return ()

    def add_head_sizes(self, writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv([self.num_kv_heads if kind == FULL else 0 for kind in self.layer_types])
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        self.add_scales(writer)
        writer.add_ssm_conv_kernel(self.config["mamba_d_conv"])
        writer.add_ssm_state_size(self.config["mamba_d_state"])
        writer.add_ssm_group_count(self.config["mamba_n_groups"])
        writer.add_ssm_time_step_rank(self.config["mamba_n_heads"])
        writer.add_ssm_inner_size(self.inner_size)
        if self.num_experts:
            self.add_experts(writer)
            writer.add_expert_shared_feed_forward_length(self.config["shared_intermediate_size"])

    def add_scales(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        writer.add_attention_scale(self.config["attention_multiplier"])
        writer.add_embedding_scale(self.config["embedding_multiplier"])
        writer.add_residual_scale(self.config["residual_multiplier"])
        writer.add_logit_scale(self.config["logits_scaling"])
        # llama.cpp's Granite reads this key as a switch for rotary embeddings.
        writer.add_rope_scaling_finetuned(self.config.get("position_embedding_type") == "rope")


class GraniteAttention(GraniteHybrid):
    """A Granite 4 model without Mamba layers. llama.cpp loads it as Granite 3."""

    arch = gguf.MODEL_ARCH.GRANITE

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.num_experts:
            yield "experts, but no Mamba layer"

    def add_head_sizes(self, writer: gguf.GGUFWriter) -> None:
        Family.add_head_sizes(self, writer)

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        self.add_scales(writer)


def _number(value: Any) -> float:
    # JSON has no infinity; transformers writes {"__float__": "Infinity"}.
    return float(value["__float__"] if isinstance(value, Mapping) else value)
