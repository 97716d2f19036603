"""On the built-in model, each engine samples exactly the tokens of the reference (transformers and PEFT in float32),
even in long completions: the weights are stored in 16 bits, but engines compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch

from benchmarks.backends.parts import Reference
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.tasks.registry import make_task
from echo_node.backends.base import Engine, EngineSettings
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.torch_engine import TorchEngine
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

BASE = resolve_base("builtin:small")


def requests() -> list[GroupRequest]:
    """Return short sums and puzzles, with completions of unequal length."""
    codec = PromptCodec.load(BASE)
    tasks = [make_task("worked", {"longest": 3}), make_task("reasoning-gym:knights_knaves", {})]
    return [
        GroupRequest(
            lease_id=number,
            group_id=number,
            indices=(0, 1),
            prompt_ids=codec.encode_prompt(tasks[number % 2].sample(number).prompt),
            seed=number,
            policy_version=0,
            temperature=1.0,
            max_tokens=160,
            stop_ids=codec.stop_ids,
        )
        for number in range(4)
    ]


@pytest.mark.parametrize("make", [LlamaCppEngine, TorchEngine])
def test_engines_draw_the_references_tokens_by_default(make: Callable[[], Engine], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    engine, asked = make(), requests()
    engine.open(BASE, tmp_path, EngineSettings(width=8, threads=1))
    try:
        assert engine.precision == "f32"
        engine.set_policy(None)
        events = list(chain.from_iterable(engine.sample(iter(asked))))
    finally:
        engine.close()
    rollouts = [event for event in events if isinstance(event, FinishedRollout)]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    assert len(lengths) == 8
    assert max(lengths) > 2 * min(lengths)
    identical, difference = Reference(BASE, None).compare(asked, rollouts)
    assert identical == 1
    assert difference < 1e-3


def test_weights_are_stored_in_16_bits_within_the_size_limit() -> None:
    (weights,) = BASE.glob("*.safetensors")
    assert weights.stat().st_size <= 7 * 2**20
    assert PromptCodec.load(BASE).context_tokens >= 1_024
