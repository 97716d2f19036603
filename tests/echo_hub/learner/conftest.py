"""A random base model that trains in milliseconds, and batches for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.section import Precision
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_shared.wire.messages import FinishReason

VOCABULARY = 40


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def make_settings(base_dir: Path) -> Callable[..., LearnerSettings]:
    """Return a function that makes small settings; keyword arguments override sections:
    make_settings(training={"steps": 2}).
    """

    def make(*, publish_precision: Precision = "auto", **sections: dict[str, Any]) -> LearnerSettings:
        training = {"lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-2, **sections.get("training", {})}
        learner = {"threads": 1, "device": "cpu", **sections.get("learner", {})}
        return LearnerSettings(
            base_dir=base_dir,
            base_name="tiny",
            seed=3,
            temperature=0.8,
            max_tokens=6,
            stop_ids=(1,),
            training=TrainingConfig(**training),
            objective=ObjectiveConfig(**sections.get("objective", {})),
            learner=LearnerConfig(**learner),
            publish_precision=publish_precision,
            lock_wait_s=0.2,
        )

    return make


@pytest.fixture
def settings(make_settings: Callable[..., LearnerSettings]) -> LearnerSettings:
    return make_settings()


@pytest.fixture
def make_groups() -> Callable[[int], list[TrainingGroup]]:
    """Return a function that makes, from a seed, six groups of four rollouts of mixed lengths; all rollouts of the
    fifth group have the same reward.
    """

    def make(seed: int) -> list[TrainingGroup]:
        rng = np.random.default_rng(seed)
        groups = []
        for number in range(6):
            rollouts = []
            for index in range(4):
                length = int(rng.integers(1, 9))
                rollouts.append(
                    TrainingRollout(
                        completion_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                        loss_mask=np.ones(length, dtype=bool),
                        behavior_logprobs=rng.uniform(-5, -1, length).astype(np.float32),
                        reward=0.25 if number == 4 else float(index % 2) + float(rng.random()),
                        finish_reason=FinishReason.STOP,
                        sampling_s=0.0,
                    )
                )
            prompt = rng.integers(0, VOCABULARY, int(rng.integers(2, 10))).astype(np.int32)
            groups.append(TrainingGroup(prompt_ids=prompt, rollouts=tuple(rollouts)))
        return groups

    return make
