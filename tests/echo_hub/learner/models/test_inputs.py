from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.plain_losses import make_datum
from echo_hub.learner.models.inputs import LOSSES, check_ids, check_pass, check_prompt, check_step, options
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, Datum, ForwardBackward, LossFunction

VOCABULARY = 40


def a_request(loss: LossFunction, config: Mapping[str, float | str] | None = None, **changes: Any) -> ForwardBackward:
    """Return a valid request; `changes` replace inputs of its second datum, None removes one."""
    rng = np.random.default_rng(0)
    first, second = (make_datum(rng, length, loss, vocab_size=VOCABULARY) for length in (6, 4))
    inputs = {name: value for name, value in {**second.loss_inputs, **changes}.items() if value is not None}
    beta = {"beta": 0.1} if loss is LossFunction.DRO else {}
    return ForwardBackward(data=(first, replace(second, loss_inputs=inputs)), loss=loss, config=config or beta)


def check(request: ForwardBackward) -> None:
    check_pass(request, vocab_size=VOCABULARY, context_tokens=6)


def test_every_loss_has_its_inputs() -> None:
    assert set(LOSSES) == set(LossFunction)


@pytest.mark.parametrize("loss", list(LossFunction))
def test_a_valid_request_passes_and_has_all_options(loss: LossFunction) -> None:
    request = a_request(loss)
    check(request)
    assert set(options(request)) == set(LOSSES[loss].defaults)


FOUR = np.zeros(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("loss", "config", "changes", "param"),
    [
        (LossFunction.CROSS_ENTROPY, {"beta": 1.0}, {}, "beta"),
        (LossFunction.PPO, {"clip_low": 0.1}, {}, "clip_low"),
        (LossFunction.PPO, {"clip_low_threshold": 1.3}, {}, "clip_low_threshold"),
        (LossFunction.PPO, {"clip_high_threshold": float("nan")}, {}, "clip_high_threshold"),
        (LossFunction.PPO, {"clip_high_threshold": "much"}, {}, "clip_high_threshold"),
        (LossFunction.DRO, {"beta": float("inf")}, {}, "beta"),
        (LossFunction.CROSS_ENTROPY, {}, {"weights": None}, "weights"),
        (LossFunction.CROSS_ENTROPY, {}, {"advantages": FOUR}, "advantages"),
        (LossFunction.PPO, {}, {"logprobs": None}, "logprobs"),
        (LossFunction.CISPO, {}, {"mask": FOUR}, "mask"),
        (LossFunction.CISPO, {}, {"advantages": FOUR[:3]}, "advantages"),
        (LossFunction.CISPO, {}, {"advantages": FOUR[:, None]}, "advantages"),
        (LossFunction.CISPO, {}, {"logprobs": np.full(4, np.inf, np.float32)}, "logprobs"),
        (LossFunction.CISPO, {}, {"target_tokens": np.full(4, VOCABULARY)}, "target_tokens"),
        (LossFunction.CISPO, {}, {"target_tokens": FOUR}, "target_tokens"),
        (LossFunction.CROSS_ENTROPY, {}, {"weights": np.zeros((4, 2), np.float32)}, "weights"),
        (LossFunction.GSPO, {}, {"sequence_ratio_mask": FOUR}, "sequence_ratio_mask"),
        (LossFunction.GSPO, {}, {"sequence_ratio_mask": FOUR - 1}, "sequence_ratio_mask"),
        (
            LossFunction.PPO,
            {},
            {"clip_low_threshold": FOUR + 2, "clip_high_threshold": FOUR + 1},
            "clip_low_threshold",
        ),
    ],
)
def test_what_a_loss_does_not_take_is_refused_by_name(
    loss: LossFunction, config: Mapping[str, float | str], changes: Mapping[str, Any], param: str
) -> None:
    with pytest.raises(Refusal) as refused:
        check(a_request(loss, config, **changes))
    assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, param)
    assert param in refused.value.what


def test_dro_needs_its_option() -> None:
    request = replace(a_request(LossFunction.DRO), config={})
    with pytest.raises(Refusal, match="needs the option beta"):
        check(request)


def test_data_that_the_model_cannot_read_are_refused_with_their_number() -> None:
    request = a_request(LossFunction.CROSS_ENTROPY)
    longer = make_datum(np.random.default_rng(0), 7, LossFunction.CROSS_ENTROPY, vocab_size=VOCABULARY)
    empty = Datum(input_ids=np.zeros(0, np.int32), loss_inputs={})
    for datum, said in ((longer, "7 tokens of 6"), (empty, "0 tokens")):
        with pytest.raises(Refusal) as refused:
            check(replace(request, data=(request.data[0], datum)))
        assert refused.value.got == f"datum 1: {said}"
    with pytest.raises(Refusal, match="no data"):
        check(replace(request, data=()))


def test_prompts_and_ids_are_checked() -> None:
    check_prompt(np.array([1, 2], np.int32), vocab_size=3, context_tokens=2)
    for prompt in ([], [1, 3], [-1], [1, 1, 1]):
        with pytest.raises(Refusal):
            check_prompt(np.array(prompt, np.int32), vocab_size=3, context_tokens=2)
    with pytest.raises(Refusal):
        check_ids(np.array([0.5]), "ids", vocab_size=3)


@pytest.mark.parametrize(
    ("changed", "value"),
    [("learning_rate", -1.0), ("beta1", 1.0), ("beta2", -0.1), ("eps", 0.0), ("weight_decay", float("inf"))],
)
def test_a_step_that_adamw_does_not_define_is_refused(changed: str, value: float) -> None:
    check_step(AdamStep())
    check_step(AdamStep(learning_rate=0.0, beta1=0.0))
    with pytest.raises(Refusal) as refused:
        check_step(replace(AdamStep(), **{changed: value}))
    assert refused.value.param == changed
