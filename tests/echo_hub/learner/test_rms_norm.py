from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from echo_hub.learner import rms_norm


def norms(kind: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    plain, own = kind(64).to(dtype), kind(64).to(dtype)
    nn.init.normal_(plain.weight)
    own.load_state_dict(plain.state_dict())
    return [plain, own]


def computed(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.float().sin().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_in_float32_bits_are_those_of_transformers(kind: Any) -> None:
    plain, own = norms(kind, torch.float32)
    assert rms_norm.use_in(nn.Sequential(own)) == 1
    x = torch.randn(1, 50, 4, 64)
    for found, expected in zip(computed(own, x), computed(plain, x), strict=True):
        assert torch.equal(found, expected)


def test_in_bfloat16_rounding_is_not_worse() -> None:
    plain, own = norms(Qwen3RMSNorm, torch.bfloat16)
    assert rms_norm.use_in(own) == 1
    x = torch.randn(1, 50, 64)
    exact = plain.float()(x.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        found = own(x.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0, rtol=2**-8)


def test_a_copy_in_another_dtype_is_left_to_transformers() -> None:
    plain, own = norms(Qwen3RMSNorm, torch.bfloat16)
    rms_norm.use_in(own)
    x = torch.randn(1, 50, 64)
    assert torch.equal(own(x), plain(x)) and own(x).dtype is torch.float32


@pytest.mark.parametrize("kind", [Qwen3NextRMSNormGated, partial(GraniteMoeHybridRMSNormGated, group_size=64)])
def test_norms_with_a_gate_stay_unchanged(kind: Any) -> None:
    assert rms_norm.use_in(nn.Sequential(kind(64))) == 0


def test_other_norms_stay_unchanged() -> None:
    gemma = Gemma2RMSNorm(64)  # Its factor is 1 + weight.
    gemma.variance_epsilon = gemma.eps  # type: ignore[assignment]
    assert rms_norm.use_in(nn.Sequential(gemma, nn.LayerNorm(64))) == 0
