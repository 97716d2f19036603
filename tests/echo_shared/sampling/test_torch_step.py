"""Decoding steps at fixed shapes (buckets), captured as CUDA graphs. `test_torch_sampler` compares the drawn tokens
with the reference.

CPUs have no CUDA graphs. A stand-in for a graph's replay calls the step's function again, with results in the same
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache

from echo_shared.sampling import draws, torch_draws, torch_step
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_cache import SlotCache, cache_argument
from echo_shared.sampling.torch_draws import draw
from echo_shared.sampling.torch_sampler import Batch
from echo_shared.sampling.torch_step import MOST_FAILURES, FixedSteps, takes_boolean_masks

VOCABULARY = 30
PROMPT = 4


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def groups(count: int, max_tokens: int) -> list[GroupRequest]:
    return [
        GroupRequest(
            lease_id=number,
            group_id=number,
            indices=(0,),
            prompt_ids=np.random.default_rng(number).integers(0, VOCABULARY, PROMPT).astype(np.int32),
            seed=draws.derive_seed(number),
            policy_version=1,
            temperature=1.0,
            max_tokens=max_tokens + number % 3,
            stop_ids=(),
        )
        for number in range(count)
    ]


def tokens_of(batch: Batch, asked: list[GroupRequest]) -> dict[int, list[int]]:
    return {one.group_id: one.completion_ids.tolist() for step in batch.sample(iter(asked)) for one in step}


class Replays:
    """Stand-in for CUDA graphs: a replay computes the step again, into the same tensor."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.offset = 0.0
        """Error that a replay adds to the computed numbers, to simulate a faulty graph."""

    def capture(self, steps: FixedSteps, step: Any) -> tuple[Any, Tensor]:
        self.captured += 1
        drawn = steps._compute(step)

        class Graph:
            def replay(_) -> None:
                self.replayed += 1
                drawn.copy_(steps._compute(step) + self.offset)

        return Graph(), drawn


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    found = Replays()
    monkeypatch.setattr(FixedSteps, "_captured", lambda steps, step: found.capture(steps, step))
    return found


def capturing(model: Any) -> Batch:
    batch = Batch(model, width=8, fixed=True)
    batch._steps._captures = True
    return batch


def test_few_shapes_serve_all_rows_and_columns() -> None:
    model, shapes = make_model(), set[tuple[int, int]]()

    def watch(_: Any, __: Any, given: Any) -> None:
        if given["input_ids"].shape[1] == 1:
            shapes.add((len(given["input_ids"]), given["attention_mask"].shape[-1]))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    asked = groups(13, 200)
    expected = tokens_of(Batch(make_model(), width=8, fixed=False), asked)
    assert tokens_of(Batch(model, width=8, fixed=True), asked) == expected
    assert {rows for rows, _ in shapes} <= {1, 2, 4, 8}
    assert {columns for _, columns in shapes} == {128, 256}


def test_a_model_that_adds_its_masks_is_sampled_without_fixed_steps() -> None:
    model = make_model()
    assert takes_boolean_masks(model)
    model.set_attn_implementation("eager")
    assert not takes_boolean_masks(model)
    batch = Batch(model, width=3, fixed=True)
    found = [rollout for finished in batch.sample(iter(groups(3, 4))) for rollout in finished]
    assert len(found) == 3 and not batch._steps._steps


def test_a_captured_step_serves_later_calls_and_new_weights(replays: Replays) -> None:
    model, asked = make_model(), groups(8, 40)
    batch = capturing(model)
    expected = tokens_of(Batch(model, width=8, fixed=False), asked)
    assert tokens_of(batch, asked) == expected
    assert replays.captured
    assert replays.replayed > 30
    assert tokens_of(batch, asked) == expected
    captured = replays.captured
    model.lm_head.weight.neg_()
    changed = tokens_of(batch, asked)
    assert changed == tokens_of(Batch(model, width=8, fixed=False), asked)
    assert changed != expected
    assert replays.captured == captured


def test_nothing_captured_is_replayed_after_tensors_were_replaced(replays: Replays) -> None:
    batch, asked = capturing(make_model()), groups(8, 40)
    tokens_of(batch, asked)
    captured = replays.captured
    batch.forget_steps()
    tokens_of(batch, asked)
    assert replays.captured == 2 * captured


def test_nothing_captured_is_replayed_on_memory_that_was_replaced(replays: Replays) -> None:
    model = make_model()
    batch = capturing(model)
    tokens_of(batch, groups(2, 40))
    assert replays.captured
    longer = groups(8, 90)
    assert tokens_of(batch, longer) == tokens_of(Batch(model, width=8, fixed=False), longer)


def test_a_graph_that_differs_is_never_used(replays: Replays, caplog: pytest.LogCaptureFixture) -> None:
    replays.offset = 1.0
    model, asked = make_model(), groups(8, 40)
    assert tokens_of(capturing(model), asked) == tokens_of(Batch(model, width=8, fixed=False), asked)
    assert (replays.captured, replays.replayed) == (1, 1)
    assert "draws other tokens" in caplog.text


def test_a_failed_capture_costs_speed_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    attempts: list[int] = []

    monkeypatch.setattr(FixedSteps, "_captured", fails)
    model, asked = make_model(), groups(8, 40)
    assert tokens_of(capturing(model), asked) == tokens_of(Batch(model, width=8, fixed=False), asked)
    assert "stream is capturing" in caplog.text
    assert len(attempts) == MOST_FAILURES


def test_what_float32_does_not_decide_is_drawn_again() -> None:
    model, asked = make_model(), groups(8, 20)

    def undecided(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
        tokens_R, logprobs_R = draw(logits_RV, u_R, temperature_R)
        tokens_R[::2] = torch_draws.UNDECIDED
        return tokens_R, logprobs_R + 1.0

    expected = tokens_of(Batch(model, width=8, fixed=False), asked)
    assert tokens_of(Batch(model, width=8, fixed=True, choose=undecided), asked) == expected


@pytest.fixture
def steps() -> Iterator[tuple[FixedSteps, torch_step._Step]]:
    """Yield fixed steps on fake tensors, which raise an error if the host reads one of their values."""
    step = torch_step._Step(torch.device("cpu"), 4, 32)
    with FakeTensorMode(), torch.inference_mode():
        step.inputs, step.columns_C = torch.zeros((6, 4), dtype=torch.int64), torch.arange(32)
        model = make_model()
        slots = SlotCache(torch.device("cpu"))
        slots.reserve(4, 32)
        prompts = DynamicCache()
        model(input_ids=torch.zeros((1, PROMPT), dtype=torch.int64), **cache_argument(prompts))
        slots.join(prompts, [0, 0, 0, 0], [0, 1, 2, 3], [PROMPT] * 4)
        yield FixedSteps(model, slots, draw), step


def test_a_step_reads_no_value_on_the_host(steps: tuple[FixedSteps, torch_step._Step]) -> None:
    """The step must not read a tensor's value on the host: a function that is captured as a CUDA graph must not wait
    for the device.
    """
    fixed, step = steps
    drawn = fixed._compute(step)
    assert drawn.shape == (2, 4)
    with pytest.raises(DataDependentOutputException):
        drawn[0, 0].item()
