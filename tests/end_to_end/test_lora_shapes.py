"""Engines sample with the learner's exact weights, for adapters on any layers and with any scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.batch import build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_node.backends.base import Engine, EngineSettings
from echo_node.backends.registry import NAMES, choose, make_engine
from echo_node.host import hardware
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import BackendError
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

TEMPERATURE = 0.8
VOCABULARY = 100
SHAPES: list[dict[str, Any]] = [
    {},
    {"lora_targets": "attention"},
    {"lora_targets": "mlp", "rslora": True},
    {"lora_targets": "v_proj,q_proj", "rslora": True},
]
EXACT = [name for name in NAMES if name != "vllm"]
"""Engines that must compute an adapter exactly. vLLM does not: it computes adapters in 16 bits only."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    directory = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def learner_of(base: Path) -> Callable[..., Policy]:
    def make(shape: dict[str, Any]) -> Policy:
        settings = LearnerSettings(
            base_dir=base,
            seed=3,
            temperature=TEMPERATURE,
            max_tokens=12,
            stop_ids=(),
            training=TrainingConfig(lora_rank=8, lora_alpha=16, **shape),
            learner=LearnerConfig(threads=1, device="cpu", precision="float32"),
        )
        policy = Policy.load(settings)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.normal_(std=0.1, generator=generator)
        return policy

    return make


@pytest.fixture(scope="module", params=EXACT)
def engine(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    try:
        choose(hardware.detect(), request.param)
    except BackendError as error:
        pytest.skip(str(error))
    made = make_engine(request.param)
    made.open(base, tmp_path_factory.mktemp("derived"), EngineSettings(width=4, threads=1, precision="f32"))
    yield made
    made.close()


def sampled(engine: Engine) -> Iterator[tuple[GroupRequest, FinishedRollout]]:
    rng = np.random.default_rng(1)
    requests = [
        GroupRequest(
            lease_id=number,
            group_id=number,
            indices=(0, 1),
            prompt_ids=rng.integers(0, VOCABULARY, 3 + number).astype(np.int32),
            seed=7 + number,
            policy_version=1,
            temperature=TEMPERATURE,
            max_tokens=12,
            stop_ids=(),
        )
        for number in range(3)
    ]
    for event in chain.from_iterable(engine.sample(iter(requests))):
        assert isinstance(event, FinishedRollout), event
        yield requests[event.group_id], event


@torch.no_grad()
def learners(policy: Policy, request: GroupRequest, rollout: FinishedRollout) -> Any:
    tokens = len(rollout.completion_ids)
    drawn = WeightedRollout(
        completion_ids=rollout.completion_ids,
        loss_mask=np.ones(tokens, dtype=bool),
        behavior_logprobs=rollout.behavior_logprobs,
        advantages=np.ones(tokens),
        weight=1.0,
    )
    group = WeightedGroup(prompt_ids=request.prompt_ids, rollouts=(drawn,))
    (batch,) = build_micro_batches([group], micro_batch_tokens=64)
    return policy.logprobs(batch).numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_engines_sample_with_the_learners_weights(
    engine: Engine, learner_of: Callable[..., Policy], tmp_path: Path, shape: dict[str, Any]
) -> None:
    policy = learner_of(shape)
    policy.save_adapter(tmp_path, policy.published())
    engine.set_policy(engine.prepare(tmp_path))
    drawn = list(sampled(engine))
    assert len(drawn) == 6
    without = 0.0
    for request, rollout in drawn:
        np.testing.assert_allclose(rollout.behavior_logprobs, learners(policy, request, rollout), atol=1e-4)
        with policy.model.disable_adapter():
            bare = learners(policy, request, rollout)
        without = max(without, float(np.abs(bare - rollout.behavior_logprobs).max()))
    assert without > 0.5, "the adapter changes the result"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_peft_reproduces_the_exported_adapter(
    base: Path, learner_of: Callable[..., Policy], tmp_path: Path, shape: dict[str, Any]
) -> None:
    policy = learner_of(shape)
    policy.save_adapter(tmp_path, policy.published())
    layers = policy.model.peft_config["default"].target_modules
    assert {module.path.rpartition(".")[2] for module in load_adapter(tmp_path).modules} == layers
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)
