"""Families of dense transformers and of mixtures of experts, by the model_type of their configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import gguf

from echo_shared.gguf.family import FULL, SLIDING, Family
from echo_shared.gguf.hybrid_families import GraniteHybrid, Lfm2, Qwen3Next, Qwen35
from echo_shared.gguf.parts import Array, Part, layer_of, plus_one

_WITH_FACTORS: Final = Family.rope_kinds | {"llama3", "longrope"}
_GELU: Final = ("gelu_pytorch_tanh",)


class Qwen2(Family):
    arch = gguf.MODEL_ARCH.QWEN2
    is_square = True

    def read_layer_types(self) -> Iterator[str]:
        return _qwen_layer_types(self)


class Qwen3(Family):
    arch = gguf.MODEL_ARCH.QWEN3
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128}

    def read_layer_types(self) -> Iterator[str]:
        return _qwen_layer_types(self)


def _qwen_layer_types(family: Family) -> Iterator[str]:
    # Sliding windows are switched on by use_sliding_window, in the layers after max_window_layers.
    config = family.config
    slides = config.get("use_sliding_window") and config.get("sliding_window")
    first = config.get("max_window_layers", 28)
    kinds = [SLIDING if slides and layer >= first else FULL for layer in range(family.num_layers)]
    yield from config.get("layer_types") or kinds


class Qwen3Moe(Qwen3):
    arch = gguf.MODEL_ARCH.QWEN3MOE
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "norm_topk_prob": False, "decoder_sparse_step": 1}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.config["norm_topk_prob"]:
            yield "norm_topk_prob: false, where llama.cpp normalises the weights of the chosen experts"
        if self.config["decoder_sparse_step"] != 1 or self.config.get("mlp_only_layers"):
            yield "layers without experts"

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_experts(writer)
        writer.add_expert_feed_forward_length(self.config["moe_intermediate_size"])


class Llama(Family):
    arch = gguf.MODEL_ARCH.LLAMA
    rope_kinds = _WITH_FACTORS
    rotates_pairs = True
    biased = Family.biased | {"o_proj", "gate_proj", "up_proj", "down_proj"}


class Mistral(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096}

    def read_layer_types(self) -> Iterator[str]:
        kind = FULL if self.config["sliding_window"] is None else SLIDING
        return iter([kind] * self.num_layers)


class SmolLM3(Family):
    arch = gguf.MODEL_ARCH.SMOLLM3
    defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True, "no_rope_layer_interval": 4}
    default_theta = 2_000_000.0
    rotates_pairs = True

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        interval = self.config["no_rope_layer_interval"]
        rotated = [int((layer + 1) % interval != 0) for layer in range(self.num_layers)]
        if [int((layer + 1) % 4 != 0) for layer in range(self.num_layers)] != (
            self.config.get("no_rope_layers") or rotated
        ):
            yield "no_rope_layers other than every fourth"


class Granite(Llama):
    arch = gguf.MODEL_ARCH.GRANITE
    defaults: ClassVar[Mapping[str, Any]] = {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        writer.add_attention_scale(self.config["attention_multiplier"])
        writer.add_embedding_scale(self.config["embedding_multiplier"])
        writer.add_residual_scale(self.config["residual_multiplier"])
        writer.add_logit_scale(self.config["logits_scaling"])


class Phi3(Family):
    """Phi-3. One linear layer computes queries, keys and values, and one computes gate and up. llama.cpp also stores
    each of these two layers as one tensor.
    """

    arch = gguf.MODEL_ARCH.PHI3
    rope_kinds = Family.rope_kinds | {"longrope"}
    rotates_partly = True
    is_square = True
    biased = frozenset()

    def read_layer_types(self) -> Iterator[str]:
        kind = FULL if self.config.get("sliding_window") is None else SLIDING
        return iter([kind] * self.num_layers)


class Glm4(Family):
    """GLM-4. Rotary embeddings rotate adjacent values, in transformers and in llama.cpp. One linear layer computes both
    gate and up.
    """

    arch = gguf.MODEL_ARCH.GLM4
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "partial_rotary_factor": 0.5}
    rotates_partly = True


class Gemma2(Family):
    arch = gguf.MODEL_ARCH.GEMMA2
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    activations = _GELU
    rounds_activations = True  # On CPUs, llama.cpp looks GELU up in a table of 16-bit numbers.
    slides = True
    every: ClassVar[int] = 2
    """Distance between layers with full attention: layers number `every`, 2 · `every` and so on. The others have a
    sliding window.
    """
    layers_of_27b: ClassVar[int] = 46
    """Number of layers of the 27B model. llama.cpp recognises the 27B model by this number, and scales its queries
    differently.
    """

    def read_layer_types(self) -> Iterator[str]:
        every = self.config.get("sliding_window_pattern", self.every)
        yield from self.config.get("layer_types") or _patterned(self.num_layers, every)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        scalar = self.hidden_size // self.num_heads if self.num_layers == self.layers_of_27b else self.head_dim
        if self.config["query_pre_attn_scalar"] != scalar:
            yield f"query_pre_attn_scalar {self.config['query_pre_attn_scalar']} instead of {scalar}"
        if self.config.get("use_bidirectional_attention"):
            yield "bidirectional attention"
        yield from self.attention_problems()

    def attention_problems(self) -> Iterator[str]:
        if not self.config["attn_logit_softcapping"] or not self.config["final_logit_softcapping"]:
            yield "attention or logits that are not capped"
        if self.window is None:
            yield "no layer with a sliding window"
        yield from _unequal_ropes(self)

    def parts(self, name: str) -> tuple[Part, ...]:
        return (Part(name=name, value=plus_one),) if name.endswith("norm.weight") else super().parts(name)

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_windows(writer)
        if self.config["attn_logit_softcapping"]:
            writer.add_attn_logit_softcapping(self.config["attn_logit_softcapping"])
        if self.config["final_logit_softcapping"]:
            writer.add_final_logit_softcapping(self.config["final_logit_softcapping"])


def _patterned(num_layers: int, every: int) -> list[str]:
    return [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]


def _unequal_ropes(family: Family) -> Iterator[str]:
    if family.window is not None and family.rope != family.sliding_rope:
        yield "other rotary embeddings in sliding layers"


class Gemma3(Gemma2):
    arch = gguf.MODEL_ARCH.GEMMA3
    defaults: ClassVar[Mapping[str, Any]] = {
        **Gemma2.defaults,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    default_theta = 1_000_000.0
    sliding_theta = 10_000.0
    rope_kinds = Family.rope_kinds - {"yarn"}
    every = 6
    layers_of_27b = 62

    def attention_problems(self) -> Iterator[str]:
        if self.config["attn_logit_softcapping"]:
            yield "capped attention"
        if not self.sliding_rope.is_plain:
            yield f"rope_type {self.sliding_rope.kind} in sliding layers"

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        writer.add_rope_freq_base_swa(self.sliding_rope.theta)


class Olmo2(Family):
    arch = gguf.MODEL_ARCH.OLMO2
    is_square = True
    needs_output = True
    slides = True

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_windows(writer)


class Olmo3(Olmo2):
    """OLMo 3. llama.cpp loads it as OLMo 2 with sliding windows."""

    defaults: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096}
    default_theta = 500_000.0
    sliding_theta = 500_000.0

    def read_layer_types(self) -> Iterator[str]:
        yield from self.config.get("layer_types") or _patterned(self.num_layers, 4)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.window is not None and not self.sliding_rope.is_plain:
            yield f"rope_type {self.sliding_rope.kind} in sliding layers"
        if self.window is not None and self.sliding_rope.theta != self.rope.theta:
            yield "another rope_theta in sliding layers"


class Cohere2(Family):
    """Cohere 2. Only sliding-window layers have rotary embeddings, which rotate adjacent values in both programs
    (transformers and llama.cpp).
    """

    arch = gguf.MODEL_ARCH.COHERE2
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
    }
    is_square = True
    slides = True

    def read_layer_types(self) -> Iterator[str]:
        yield from self.config.get("layer_types") or _patterned(
            self.num_layers, self.config.get("sliding_window_pattern") or 4
        )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.window is None:
            yield "no layer with a sliding window"
        yield from _unequal_ropes(self)

    def add_norm_eps(self, writer: gguf.GGUFWriter) -> None:
        writer.add_layer_norm_eps(self.config["layer_norm_eps"])

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_windows(writer)
        writer.add_logit_scale(self.config["logit_scale"])


class Exaone4(Family):
    """EXAONE 4. Only sliding-window layers have rotary embeddings. If the model has no such layer, all layers have
    them.
    """

    arch = gguf.MODEL_ARCH.EXAONE4
    defaults: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096, "sliding_window_pattern": 4}
    rope_kinds = Family.rope_kinds | {"llama3"}
    is_square = True
    slides = True
    layers_of_32b: ClassVar[int] = 64
    """Number of layers of the 32B model, the only one for which llama.cpp computes sliding windows."""

    def read_layer_types(self) -> Iterator[str]:
        every = self.config["sliding_window_pattern"] if self.config["sliding_window"] is not None else None
        if isinstance(every, str):
            every = len(every)
        kinds = [FULL] * self.num_layers if not every else _patterned(self.num_layers, every)
        yield from self.config.get("layer_types") or kinds

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.window is not None and self.num_layers != self.layers_of_32b:
            yield f"sliding windows in a model of {self.num_layers} layers, not {self.layers_of_32b}"
        if self.window is None and (self.config["sliding_window"] or self.num_layers == self.layers_of_32b):
            yield "no layer with a sliding window"
        yield from _unequal_ropes(self)

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_windows(writer)


class GptOss(Family):
    arch = gguf.MODEL_ARCH.GPT_OSS
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    default_theta = 150_000.0
    slides = True
    needs_output = True
    biased = Family.biased | {"o_proj", "router"}

    def read_layer_types(self) -> Iterator[str]:
        yield from self.config.get("layer_types") or _patterned(self.num_layers, 2)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if (self.config["swiglu_alpha"], self.config["swiglu_limit"]) != (1.702, 7.0):
            yield "experts with another activation than gpt-oss's"
        if self.window is None:
            yield "no layer with a sliding window"
        yield from _unequal_ropes(self)

    def parts(self, name: str) -> tuple[Part, ...]:
        layer, _, last = name.rpartition(".")
        if last == "sinks":
            return (Part(name=f"{name}.weight"),)
        if not layer.endswith("mlp.experts"):
            return super().parts(name)
        kind = "bias" if last.endswith("_bias") else "weight"
        if last.startswith("down_proj"):
            return (Part(name=f"{layer}.down_proj.{kind}", value=_outputs_first),)
        # In the last dimension, which counts outputs, rows of gate and up alternate.
        return (
            Part(name=f"{layer}.gate_proj.{kind}", value=_even),
            Part(name=f"{layer}.up_proj.{kind}", value=_odd),
        )

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        self.add_windows(writer)
        self.add_experts(writer)
        writer.add_expert_feed_forward_length(self.intermediate_size)


def _outputs_first(array: Array) -> Array:
    return array.swapaxes(1, 2) if array.ndim == 3 else array


def _even(array: Array) -> Array:
    return _outputs_first(array[..., ::2])


def _odd(array: Array) -> Array:
    return _outputs_first(array[..., 1::2])


_ABSORBED: Final = "llama.cpp computes this layer of latent attention without adapters"


class DeepseekV2(Family):
    """DeepSeek-V2. Latent attention is computed as attention with a single key head: the up-projections of keys and
    values are multiplied into the queries and the outputs.
    """

    arch = gguf.MODEL_ARCH.DEEPSEEK2
    defaults: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    }
    biased = frozenset()
    layers_of_lite: ClassVar[tuple[int, ...]] = (26, 27)
    """Possible numbers of layers of V2-Lite, which has no q_lora_rank. llama.cpp recognises V2-Lite by them."""
    fixed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), _ABSORBED
    )

    @property
    def rotated_head_dim(self) -> int:
        dim: int = self.config["qk_rope_head_dim"]
        return dim

    @property
    def kv_values_per_token(self) -> int:
        per_layer: int = self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"]
        return self.num_layers * per_layer

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config["topk_method"] != "greedy":
            yield f"topk_method {self.config['topk_method']}"
        if self.config.get("moe_layer_freq", 1) != 1:
            yield "layers without experts between those with experts"
        if self.config["rms_norm_eps"] != 1e-6:
            yield f"rms_norm_eps {self.config['rms_norm_eps']} instead of 1e-6"
        if self.config["q_lora_rank"] and self.num_layers in self.layers_of_lite:
            yield f"q_lora_rank in a model of {self.num_layers} layers"
        whole, part = (self.rope.options.get(name) for name in ("mscale", "mscale_all_dim"))
        if self.rope.kind == "yarn" and (not whole or whole != part or self.rope.options.get("attention_factor")):
            yield "YaRN without equal mscale and mscale_all_dim"

    def parts(self, name: str) -> tuple[Part, ...]:
        if layer_of(name) != "kv_b_proj":
            return super().parts(name)
        layer = name.removesuffix(".kv_b_proj.weight")
        return (
            Part(name=f"{layer}.k_b_proj.weight", value=self._key_half),
            Part(name=f"{layer}.v_b_proj.weight", value=self._value_half),
        )

    def _key_half(self, array: Array) -> Array:
        by_head = array.reshape(self.num_heads, -1, array.shape[-1])
        return by_head[:, : self.config["qk_nope_head_dim"]].swapaxes(1, 2)

    def _value_half(self, array: Array) -> Array:
        by_head = array.reshape(self.num_heads, -1, array.shape[-1])
        return by_head[:, self.config["qk_nope_head_dim"] :]

    def attention_factor(self) -> float:
        return 1.0  # llama.cpp computes the factor itself, from mscale_all_dim.

    def add_head_sizes(self, writer: gguf.GGUFWriter) -> None:
        rank, rotated = self.config["kv_lora_rank"], self.config["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(self.config["qk_nope_head_dim"] + rotated)
        writer.add_value_length_mla(self.config["v_head_dim"])

    def add_more(self, writer: gguf.GGUFWriter) -> None:
        super().add_more(writer)
        if self.rope.kind == "yarn":
            # Write a tenth, as llama.cpp's own converter does: the loader multiplies the value by 10.
            writer.add_rope_scaling_yarn_log_mul(0.1 * self.rope.options["mscale_all_dim"])
        writer.add_kv_lora_rank(self.config["kv_lora_rank"])
        writer.add_q_lora_rank(self.config["q_lora_rank"] or 0)
        writer.add_leading_dense_block_count(self.config["first_k_dense_replace"])
        self.add_experts(writer)
        writer.add_expert_feed_forward_length(self.config["moe_intermediate_size"])
        writer.add_expert_shared_count(self.config["n_shared_experts"])
        writer.add_expert_weights_scale(self.config["routed_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


FAMILIES: Final[Mapping[str, type[Family]]] = {
    "cohere2": Cohere2,
    "deepseek_v2": DeepseekV2,
    "exaone4": Exaone4,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "glm4": Glm4,
    "gpt_oss": GptOss,
    "granite": Granite,
    "granitemoehybrid": GraniteHybrid,
    "lfm2": Lfm2,
    "llama": Llama,
    "mistral": Mistral,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_5_text": Qwen35,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "smollm3": SmolLM3,
}
