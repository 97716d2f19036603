from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echo_hub.learner.batch import build_micro_batches
from echo_hub.learner.cuts import ChunkSizes
from echo_hub.learner.fit import MOST_TOKENS
from echo_hub.learner.objectives.loss import StepLoss
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import _random_group, first_cut, place
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.step import accumulate_gradient
from tests.echo_hub.learner.limited_memory import LimitedMemory

MakeSettings = Callable[..., LearnerSettings]


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, ChunkSizes(micro_batch_tokens=16_384, gradient_checkpointing=False)),
        ({"micro_batch_tokens": 128}, ChunkSizes(micro_batch_tokens=128, gradient_checkpointing=False)),
        ({"gradient_checkpointing": True}, ChunkSizes(micro_batch_tokens=16_384, gradient_checkpointing=True)),
    ],
)
def test_on_a_cpu_nothing_is_measured(
    make_settings: MakeSettings, learner: dict[str, object], expected: ChunkSizes
) -> None:
    settings = make_settings(learner=learner)
    policy = Policy.load(settings)
    assert first_cut(policy, settings) == expected
    assert place(policy, settings.learner).startswith("1 x cpu, ")


def test_the_chosen_size_fits_and_leaves_little_memory(make_settings: MakeSettings) -> None:
    settings = make_settings(learner={"gradient_checkpointing": False})
    policy = Policy.load(settings)
    loss = StepLoss(settings.objective)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    memory = LimitedMemory(24 * 2**20)
    cut = first_cut(policy, settings, memory)
    assert memory.refused == 0 and 1_024 < cut.micro_batch_tokens < MOST_TOKENS

    def peak_bytes(tokens: int) -> int:
        (batch,) = build_micro_batches([_random_group(policy.vocab_size, tokens)], micro_batch_tokens=tokens)
        whole = LimitedMemory()
        with whole.measuring():
            accumulate_gradient(policy, batch, loss)
        return whole.peak_bytes

    assert 0.8 * memory.limit_bytes < peak_bytes(cut.micro_batch_tokens) < 0.95 * memory.limit_bytes
    assert peak_bytes(cut.micro_batch_tokens * 5 // 4 + 512) > memory.limit_bytes
    for parameter in policy.parameters.values():
        parameter.grad = None
    assert torch.get_rng_state().equal(state), "measuring does not change the run"


def test_little_memory_has_layers_computed_twice_and_no_gradient_is_left(make_settings: MakeSettings) -> None:
    settings = make_settings()
    policy = Policy.load(settings)
    found = {}
    for mib in (400, 12):
        found[mib] = first_cut(policy, settings, LimitedMemory(mib * 2**20))
        assert all(parameter.grad is None for parameter in policy.parameters.values())
    assert [found[mib].gradient_checkpointing for mib in (400, 12)] == [False, True]
    assert found[400].micro_batch_tokens > found[12].micro_batch_tokens > 1_024


def test_a_device_on_which_nothing_fits_gets_the_least(make_settings: MakeSettings) -> None:
    settings = make_settings()
    memory = LimitedMemory(10_000)
    assert first_cut(Policy.load(settings), settings, memory) == ChunkSizes(
        micro_batch_tokens=64, gradient_checkpointing=True
    )
    assert memory.refused == 2
