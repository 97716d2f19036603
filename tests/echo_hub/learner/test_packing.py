from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MambaConfig, Qwen3Config, Qwen3NextConfig

from echo_hub.learner import packing
from echo_hub.learner.packing import Gather, Rows
from echo_shared.errors import LearnerError

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CPU = torch.device("cpu")

ROWS = Rows.of(
    [np.array([[0, 1, 2, 3, 4]]), np.array([[0, 1, 5, 5], [6, 7, 8, 9]])],
    np.array([0, 1, 2, 3, 4, 7, 9, 10, 11, 12]),
)
IDS = torch.tensor([3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
POSITION_IDS = torch.tensor([0, 1, 2, 3, 4, 2, 0, 1, 2, 3])


def make_body(config: Any) -> Any:
    packing.register()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=packing.ATTENTION)
    model.set_attn_implementation(packing.attention_of(model))
    return model.base_model.eval()


@pytest.fixture(scope="module")
def bodies() -> Iterator[dict[str, Any]]:
    yield {
        "qwen3": make_body(Qwen3Config(**SMALL, **ATTENTION)),
        "llama": make_body(LlamaConfig(**SMALL, **ATTENTION)),
        "windowed": make_body(Qwen3Config(**SMALL, **ATTENTION, **WINDOW)),
        "capped": make_body(Gemma2Config(**SMALL, **ATTENTION, sliding_window=4, attn_logit_softcapping=2.0)),
    }


@pytest.mark.parametrize("name", ["qwen3", "llama", "windowed", "capped"])
def test_packed_rows_are_each_row_alone(bodies: dict[str, Any], name: str) -> None:
    packed = packing.packed_states(bodies[name], IDS, POSITION_IDS, ROWS)
    alone = [bodies[name](input_ids=IDS[None, row]).last_hidden_state[0] for row in ([0, 1, 2, 3, 4], [6, 7, 8, 9])]
    other = bodies[name](input_ids=IDS[None, [0, 1, 5]]).last_hidden_state[0]
    expected = torch.cat([alone[0], other[2:], alone[1]])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packing.separate_states(bodies[name], IDS, ROWS), expected, atol=1e-5, rtol=1e-5)


def test_packed_and_separate_rows_have_the_same_gradient(bodies: dict[str, Any]) -> None:
    body = bodies["qwen3"]
    weights = torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    gradients = []
    for states in (
        packing.packed_states(body, IDS, POSITION_IDS, ROWS),
        packing.separate_states(body, IDS, ROWS),
    ):
        body.zero_grad(set_to_none=True)
        (states * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in body.parameters()]))
    scale = gradients[0].abs().max()
    assert scale > 0
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, atol=1e-6, rtol=0)


def test_without_rows_packing_equals_sdpa(bodies: dict[str, Any]) -> None:
    body = bodies["qwen3"]
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    ours = body(input_ids=IDS[None, :5], attention_mask=mask).last_hidden_state
    body.set_attn_implementation("sdpa")
    theirs = body(input_ids=IDS[None, :5], attention_mask=mask).last_hidden_state
    body.set_attn_implementation(packing.ATTENTION)
    assert torch.equal(ours[:, 2:], theirs[:, 2:])


def test_transformers_of_attention_alone_pack(bodies: dict[str, Any]) -> None:
    assert {name: packing.longest_packed(body, CPU) for name, body in bodies.items()} == dict.fromkeys(
        bodies, sys.maxsize
    )
    assert bodies["windowed"].config.sliding_window == 4, "the test of another window leaves no trace"


def test_windows_without_effect_on_masks_limit_packed_rows(bodies: dict[str, Any]) -> None:
    """`longest_packed` tests packing with short rows and a shortened window. A window without effect on masks cannot be
    shortened, so the test says nothing about rows longer than that window."""
    body = bodies["llama"]
    body.config.attention_chunk_size = 5
    try:
        assert packing.longest_packed(body, CPU) == 5
    finally:
        del body.config.attention_chunk_size


def test_windows_that_packed_rows_ignore_limit_them(bodies: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    body = bodies["windowed"]
    monkeypatch.setattr(body.config, "sliding_window", 6)
    for layer in body.layers:
        if layer.self_attn.sliding_window:
            monkeypatch.setattr(layer.self_attn, "sliding_window", 6)
    assert packing.longest_packed(body, CPU) == sys.maxsize
    whole = packing._causal_mask
    monkeypatch.setattr(packing, "_causal_mask", lambda length, _window, device: whole(length, None, device))
    assert packing.longest_packed(body, CPU) == 6


def test_a_model_without_an_attention_function_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(LearnerError, match="no attention function"):
        packing.packed_attention_of_model(torch.nn.Identity(), query, query, query, None)


@pytest.mark.filterwarnings("ignore")  # Both models warn that fast kernels are not installed.
def test_models_with_other_token_mixing_do_not_pack() -> None:
    linear = Qwen3NextConfig(
        **SMALL,
        **ATTENTION,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        layer_types=["linear_attention", "full_attention"],
    )
    assert packing.longest_packed(make_body(linear), CPU) == 0
    assert packing.longest_packed(make_body(MambaConfig(**SMALL, state_size=4)), CPU) == 0


def test_take_sums_the_gradients_of_repeated_rows() -> None:
    values = torch.arange(6.0).reshape(3, 2).requires_grad_()
    taken = packing.take(values, torch.tensor([[0, 2], [2, 2]]))
    assert taken.tolist() == [[[0, 1], [4, 5]], [[4, 5], [4, 5]]]
    taken.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[1, 1], [0, 0], [3, 3]]


@pytest.mark.parametrize("parts", [(), (300, 500, 100)])
def test_gathered_rows_have_the_gradient_of_separate_takes(parts: tuple[int, ...]) -> None:
    """The gradient has the same bits as with a separate `take` for each part, whose gradients autograd adds from the
    last part to the first."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, 200, 900)
    values = torch.randn(210, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(900, 8, generator=torch.Generator().manual_seed(1))
    separate = [packing.take(values, part) for part in torch.from_numpy(index).split(list(parts) or [900])]
    (expected,) = torch.autograd.grad((torch.cat(separate) * weights).sum(), values)
    together = packing.gathered(values, Gather.of(index, len(values), parts))
    assert torch.equal(together, torch.cat(separate))
    (found,) = torch.autograd.grad((together * weights).sum(), values)
    assert torch.equal(found, expected)
