"""Models with random weights in the shapes of real models, and adapters for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE

LORA_RANK: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int = 151_936
    tied: bool = True

    def config(self, *, stop_id: int | None = None) -> Any:
        """Return the configuration for transformers. `stop_id` is the token that ends a text; it is also the padding
        token.
        """
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            max_position_embeddings=4_096,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=stop_id,
            pad_token_id=stop_id,
        )

    def operations(self, inputs: int, trained: int) -> float:
        """Return the number of operations in the matrix products of a step with `inputs` tokens, `trained` of them
        trained. It counts the forward pass, and the backward pass to the inputs only, because the base's weights get no
        gradient.
        """
        attention = self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        layer = self.hidden * (attention + 3 * self.intermediate)
        return 4.0 * (inputs * self.layers * layer + trained * self.vocabulary * self.hidden)


QWEN3_06B: Final = Shape(hidden=1_024, layers=28, heads=16, key_value_heads=8, head_dim=128, intermediate=3_072)
"""Shape (numbers of layers, heads and so on) of Qwen3-0.6B, but with a shorter context."""
QWEN3_8B: Final = Shape(
    hidden=4_096, layers=36, heads=32, key_value_heads=8, head_dim=128, intermediate=12_288, tied=False
)
HALF_GIGABYTE: Final = Shape(hidden=768, layers=19, heads=12, key_value_heads=4, head_dim=64, intermediate=2_304)
"""Shape of a model whose bfloat16 weights take 500 MB."""
SMALL: Final = Shape(
    hidden=512, layers=8, heads=8, key_value_heads=4, head_dim=64, intermediate=1_536, vocabulary=8_192
)
"""Shape of a model of 30 million weights, which draws a token in milliseconds."""


def random_model(
    directory: Path, shape: Shape, seed: int, *, dtype: torch.dtype = torch.bfloat16, stop_id: int | None = None
) -> Path:
    """Write a model in Hugging Face layout, unless it exists; return `directory`."""
    if not directory.exists():
        torch.manual_seed(seed)
        config = shape.config(stop_id=stop_id)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return directory


def random_adapter(base: Path, directory: Path, seed: int) -> Path:
    """Write a LoRA adapter for all linear layers of a base, with values like those after the first training steps."""
    config = json.loads((base / "config.json").read_text())
    hidden, intermediate, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            down, up = ((LORA_RANK, columns), columns**-0.5), ((rows, LORA_RANK), 0.002)
            for part, (size, scale) in (("A", down), ("B", up)):
                values = rng.standard_normal(size, dtype=np.float32) * np.float32(scale)
                tensors[f"{path}.lora_{part}.weight"] = values
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS_FILE)
    description = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(description))
    return directory


T = TypeVar("T")


def synchronize() -> None:
    """Wait until the GPU has finished its work; does nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], T]) -> tuple[float, T]:
    synchronize()
    began = time.perf_counter()
    result = work()
    synchronize()
    return time.perf_counter() - began, result


def matrix_operations_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product: the fastest of six repetitions."""
    size = 8_192 if device.type == "cuda" else 1_024
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    return float(2 * size**3 / min(timed(lambda: left @ right)[0] for _ in range(6)))
