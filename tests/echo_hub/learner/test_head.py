from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo_hub.learner.head import Head, check
from echo_shared.errors import LearnerError
from tests.families import FAMILIES

CPU = torch.device("cpu")


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "scale", "cap"),
    [("qwen3", 1.0, None), ("gemma2", 1.0, 3.0), ("granite", 0.5, None), ("cohere2", 0.5, None)],
)
def test_scale_and_cap_are_those_of_the_model(family: str, scale: float, cap: float | None) -> None:
    model = make_model(family)
    head = Head.of(model)
    assert (head.scale, head.cap) == (scale, cap)
    ids = torch.arange(9)[None]
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(head(states), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(head.finish(head.linear(states)), expected, atol=1e-6, rtol=0)
    check(model, CPU)


def test_logits_of_another_kind_are_refused() -> None:
    model = make_model("granite")
    model.config.logits_scaling, model.config.unknown_scaling = 1.0, 2.0
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: output / 2.0)
    plain = Head.of(model)
    assert plain.scale == 1.0
    with pytest.raises(LearnerError, match=r"(?s)computes its logits.*granite.*docs/models\.md"):
        check(wrapped(model), CPU)


def wrapped(model: Any) -> Any:
    """Return a model whose forward pass halves its logits, although no setting of its configuration says so."""
    forward = model.forward

    def halved(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits / 2.0
        return output

    model.forward = halved
    return model
