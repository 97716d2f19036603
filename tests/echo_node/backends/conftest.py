"""Small random models and adapters of every architecture, and a slow, simple sampler whose rollouts every engine must
reproduce.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from echo_node.backends.base import EngineEvent
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCABULARY = 100
MAX_POSITIONS = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen3_yarn": lambda: Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True, rope_parameters=YARN_ROPE),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2_wide": lambda: Qwen2Config(**{**SHAPE, "hidden_size": 192}, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True),
    "llama3_rope": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LINEAR_ROPE),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that takes a name in CONFIGS, makes the random float32 model of that name (once), and returns
    the model's directory.
    """
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
            for parameter_name, parameter in model.named_parameters():
                # An engine that ignores biases and norms would go unnoticed if biases were zero and norms one.
                if parameter_name.endswith(("bias", "norm.weight")):
                    parameter.data += 0.1 * torch.randn_like(parameter)
            made[name] = tmp_path_factory.mktemp(name) / name
            model.save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def base(base_of: Callable[[str], Path]) -> Path:
    return base_of("qwen3")


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a random PEFT adapter for a base model, once for each set of options; options go to
    LoraConfig.
    """
    made: dict[str, Path] = {}

    def make(base: Path, seed: int, **options: Any) -> Path:
        what = repr((base, seed, options))
        if what in made:
            return made[what]
        torch.manual_seed(seed)
        config = LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS, **options})
        bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with quiet_peft():
            model = get_peft_model(bare, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
        directory = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(str(directory))
        made[what] = directory
        return directory

    return make


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        # For mixtures of experts, PEFT itself sets a rank pattern, and then warns about it.
        warnings.filterwarnings("ignore", message=".*rank_pattern keys did not match", category=RuntimeWarning)
        yield


@functools.cache
def load_reference(base: Path, adapter: Path | None = None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        with quiet_peft():
            model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits [len(ids), vocabulary] of one forward pass without a cache."""
    logits: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([list(ids)])).logits[0].float().numpy()
    return logits


def reference_rollout(model: Any, request: GroupRequest, index: int) -> tuple[list[int], list[float]]:
    """Sample token by token; each token's logits come from a forward pass over the whole sequence, and `draws.draw`
    selects it. Every engine must give the same rollout. Results are cached.
    """
    prompt, stop_ids = tuple(request.prompt_ids.tolist()), frozenset(request.stop_ids)
    return _drawn(model, prompt, request.seed, index, request.max_tokens, stop_ids, request.temperature)


@functools.cache
def _drawn(
    model: Any, prompt: tuple[int, ...], seed: int, index: int, max_tokens: int, stop_ids: Set[int], temperature: float
) -> tuple[list[int], list[float]]:
    u = draws.uniforms(seed, index, max_tokens)
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < max_tokens and (not ids or ids[-1] not in stop_ids):
        logits = reference_logits(model, [*prompt, *ids])[-1:]
        token, logprob = draws.draw(logits, u[len(ids) : len(ids) + 1], temperature)
        ids.append(int(token[0]))
        logprobs.append(float(logprob[0]))
    return ids, logprobs


def make_requests(
    count: int, *, group_size: int = 4, policy_version: int = 0, first_lease: int = 0, max_tokens: int = 12
) -> list[GroupRequest]:
    """Return groups with prompts of 1 to 17 tokens and three temperatures; a fifth of the vocabulary are stop
    tokens.
    """
    rng = np.random.default_rng(3 + first_lease)
    return [
        GroupRequest(
            lease_id=first_lease + number,
            group_id=1_000 + number,
            indices=tuple(range(2, 2 + group_size)),
            prompt_ids=rng.integers(0, VOCABULARY, 1 + (number * 5) % 17).astype(np.int32),
            seed=draws.derive_seed("test", first_lease + number),
            policy_version=policy_version,
            temperature=(1.0, 0.7, 1.3)[number % 3],
            max_tokens=max_tokens,
            stop_ids=tuple(range(0, VOCABULARY, 5)),
        )
        for number in range(count)
    ]


def rollouts_of(events: Sequence[EngineEvent]) -> dict[tuple[int, int], FinishedRollout]:
    """Return rollouts by lease and index. Fails if a rollout comes twice or a group has failed."""
    assert all(isinstance(event, FinishedRollout) for event in events), events
    rollouts = [event for event in events if isinstance(event, FinishedRollout)]
    by_name = {(rollout.lease_id, rollout.index): rollout for rollout in rollouts}
    assert len(by_name) == len(rollouts)
    return by_name


@pytest.fixture(scope="session")
def kit() -> Any:
    return types.SimpleNamespace(
        load_reference=load_reference,
        reference_logits=reference_logits,
        reference_rollout=reference_rollout,
        make_requests=make_requests,
        rollouts_of=rollouts_of,
        vocabulary=VOCABULARY,
        max_positions=MAX_POSITIONS,
    )
