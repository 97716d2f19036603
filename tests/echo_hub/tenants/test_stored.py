from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from echo_hub.tenants.outcomes import Failed, StepTaken, WeightsSaved
from echo_hub.tenants.requests import (
    AdamStep,
    Datum,
    ForwardBackward,
    LoraWish,
    LossFunction,
    PassResult,
    PromptLogprobs,
    Sample,
    SampledSpan,
    SampleResult,
    SamplingWish,
    WeightsKind,
)
from echo_hub.tenants.stored import LoadWork, SampleWork, SaveWork, pack_stored, unpack_outcome, unpack_stored

IDS = np.arange(5, dtype=np.int32)
DATUM = Datum(
    input_ids=IDS,
    loss_inputs={"target_tokens": IDS.astype(np.int64).reshape(5, 1), "weights": np.full((5, 1), -0.5, np.float32)},
    spans=(SampledSpan(sequence_id="r-1-0", offset=0, start=2, length=3),),
)
VALUES = [
    ForwardBackward(data=(DATUM, DATUM), loss=LossFunction.PPO, config={"beta": 0.5, "mode": "x"}),
    AdamStep(learning_rate=1e-3),
    SaveWork(weights=WeightsKind.SAMPLER, path="", sampler_id="s-1:sample:0", ttl_s=3.0, recipients=("age1",)),
    LoadWork(path="tinker://a/weights/b", optimizer=True, lora=LoraWish(seed=2**60)),
    SampleWork(
        prompt_ids=IDS,
        wish=SamplingWish(stop_ids=frozenset({3, 1}), stop_strings=("\n", "end"), seed=-1),
        sequence_ids=("a", "b"),
        policy_version=2**30,
        seed=2**64 - 1,
        first_index=7,
    ),
    SampleWork(
        prompt_ids=IDS, wish=SamplingWish(stop_ids=None), sequence_ids=(), policy_version=0, seed=0, first_index=0
    ),
]
OUTCOMES = [
    PassResult(logprobs=(np.array([-1.5], np.float32), np.zeros((2, 3), np.float32)), metrics={"loss:sum": 1.0}),
    SampleResult(
        samples=(Sample(sequence_id="a", token_ids=IDS, logprobs=-IDS.astype(np.float32), finish="stop", index=0),),
        prompt_logprobs=PromptLogprobs(logprobs=np.array([np.nan, -1.0], np.float32)),
    ),
    StepTaken(metrics={}),
    WeightsSaved(path="tinker://a/weights/b"),
    Failed(error="ä\n", category="user"),
]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, each.name), getattr(right, each.name)) for each in fields(left)
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return type(right) is tuple and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_work_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack_stored(pack_stored(value), type(value)), value)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda value: type(value).__name__)
def test_outcomes_come_back_as_they_were(outcome: Any) -> None:
    assert same(unpack_outcome(pack_stored(outcome)), outcome)


def test_other_values_are_not_stored() -> None:
    with pytest.raises(TypeError, match="object cannot be stored"):
        pack_stored(StepTaken(metrics={"a": object()}))  # type: ignore[dict-item]
