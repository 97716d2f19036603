from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo_node.backends import torch_linear
from echo_node.backends.torch_linear import SamplerLinear, replace_linears


@pytest.fixture(params=["packed", "plain"], autouse=True)
def _packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_linear, "_PACKED_PRODUCTS", 0 if request.param == "packed" else 2**62)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.02)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 32])
def test_the_fast_layer_equals_the_plain_one(dtype: torch.dtype, atol: float, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).to(dtype)
    layer = SamplerLinear(linear, rows=rows)
    assert layer.shape == (80, 48)
    assert isinstance(linear.bias, nn.Parameter) is bias
    a, b = torch.randn(4, 48).to(dtype), torch.randn(80, 4).to(dtype)
    with torch.inference_mode():
        for shape in ((1, 1, 48), (rows, 1, 48), (3, 17, 48)):
            x = torch.randn(shape).to(dtype)
            layer.set_update(None, in_place=False)
            torch.testing.assert_close(layer(x), linear(x), rtol=0, atol=atol)
            layer.set_update((a, b), in_place=False)
            expected = linear(x) + functional.linear(functional.linear(x, a), b)
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=atol)


def test_an_update_in_place_keeps_its_tensors_and_leaves_the_given_ones_alone() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80)
    layer = SamplerLinear(linear, rows=8)
    x = torch.randn(3, 48)

    def update(rank: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rank, 48), torch.randn(80, rank)

    def computes(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(layer(x), linear(x) + x @ a.T @ b.T, rtol=0, atol=1e-4)

    first, second, wider = update(4), update(4), update(6)
    given = [tensor.clone() for tensor in first]
    assert layer.set_update(None, in_place=True), "as it was"
    assert not layer.set_update(first, in_place=True)
    computes(*first)
    assert layer.set_update(second, in_place=True)
    computes(*second)
    assert all(map(torch.equal, first, given)), "another policy's tensors are not overwritten"
    assert not layer.set_update(wider, in_place=True)
    computes(*wider)
    assert not layer.set_update(None, in_place=True)
    torch.testing.assert_close(layer(x), linear(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_projections_and_output_are_replaced(tied: bool) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=tied,
    )
    model: Any = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(0, 64, (2, 5))
    with torch.inference_mode():
        expected = model(ids).logits
        layers = replace_linears(model, rows=8)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    assert len(layers) == 14
    assert layers["model.layers.1.mlp.up_proj"] is model.model.layers[1].mlp.up_proj
    assert layers["model.layers.1.mlp.up_proj"].shape == (48, 32)
    assert isinstance(model.lm_head, SamplerLinear)
    assert [name for name, _ in model.named_parameters() if "proj" in name or "lm_head" in name] == []
