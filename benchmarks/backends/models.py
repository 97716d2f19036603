"""Models and prompts for the engines: the built-in trained model, and a random model of a real model's shape."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness.requests import group_request
from echo_hub.run.base_model import resolve_base
from echo_hub.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from echo_shared import draws
from echo_shared.adapter import CONFIG_FILE, PROJECTIONS, WEIGHTS_FILE
from echo_shared.sampling import GroupRequest

MID: Final[dict[str, Any]] = {
    "vocab_size": 151_936,
    "hidden_size": 1_024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3_072,
    "max_position_embeddings": 4_096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Qwen3-0.6B's shape (its config.json), with less context."""

LORA_RANK: Final = 16
GROUP_SIZE: Final = 8
MID_PROMPT_TOKENS: Final = 32
TINY_MAX_TOKENS: Final = 8


class Models:
    """Model directories in Hugging Face layout, made on first use. Each model has two adapters."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed

    @cached_property
    def tiny(self) -> Path:
        return resolve_base("builtin:tiny")

    @cached_property
    def mid(self) -> Path:
        mid = self._directory / "mid"
        torch.manual_seed(self._seed)
        AutoModelForCausalLM.from_config(Qwen3Config(**MID), dtype=torch.bfloat16).save_pretrained(mid)
        return mid

    @cached_property
    def tiny_adapters(self) -> tuple[Path, Path]:
        return _adapter_pair(self.tiny, self._directory / "tiny-adapter", self._seed)

    @cached_property
    def mid_adapters(self) -> tuple[Path, Path]:
        return _adapter_pair(self.mid, self._directory / "mid-adapter", self._seed)


def _adapter_pair(base: Path, directory: Path, seed: int) -> tuple[Path, Path]:
    return _make_adapter(base, directory / "1", seed), _make_adapter(base, directory / "2", seed + 1)


def _make_adapter(base: Path, directory: Path, seed: int) -> Path:
    """Make a LoRA adapter on all linear layers, with values of the first training steps."""
    config = json.loads((base / "config.json").read_text())
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    kv, intermediate = config["num_key_value_heads"] * head, config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = _normal(rng, (LORA_RANK, columns), columns**-0.5)
            tensors[f"{path}.lora_B.weight"] = _normal(rng, (rows, LORA_RANK), 0.002)
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS_FILE)
    description = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": sorted(PROJECTIONS),
        "bias": "none",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(description))
    return directory


def _normal(rng: np.random.Generator, shape: tuple[int, int], scale: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def sums(count: int, seed: int, *, group_size: int = GROUP_SIZE) -> list[GroupRequest]:
    """Make groups of the tiny model's own task: short completions that end by themselves."""
    task = ArithmeticTask(ArithmeticOptions())
    base = resolve_base("builtin:tiny")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    stop_id = json.loads((base / "config.json").read_text())["eos_token_id"]
    return [
        group_request(
            number,
            np.array(tokenizer.encode(task.sample(draws.derive_seed(seed, number)).prompt).ids, np.int32),
            seed=draws.derive_seed("sums", seed, number),
            indices=range(group_size),
            max_tokens=TINY_MAX_TOKENS,
            stop_ids=(stop_id,),
        )
        for number in range(count)
    ]


def texts(
    max_tokens: list[int], seed: int, *, prompt_tokens: int = MID_PROMPT_TOKENS, group_size: int = GROUP_SIZE
) -> list[GroupRequest]:
    """Make groups of random tokens for the mid-size model. Each rollout has `max_tokens` tokens."""
    rng = np.random.default_rng(seed)
    return [
        group_request(
            number,
            rng.integers(0, MID["vocab_size"], prompt_tokens).astype(np.int32),
            seed=draws.derive_seed("texts", seed, number),
            indices=range(group_size),
            max_tokens=limit,
        )
        for number, limit in enumerate(max_tokens)
    ]
