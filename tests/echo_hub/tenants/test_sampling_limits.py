from __future__ import annotations

import numpy as np
import pytest

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import SamplingWish
from echo_hub.tenants.sampling_limits import GREEDY_TEMPERATURE, SamplingFacts, complete

FACTS = SamplingFacts(vocabulary_size=100, context_tokens=32, stop_ids=frozenset({2}))
PROMPT = np.array([5, 6], np.int32)


def test_open_values_are_filled_in() -> None:
    wish = complete(PROMPT, SamplingWish(temperature=0.0), FACTS)
    assert (wish.max_tokens, wish.stop_ids, wish.temperature) == (30, frozenset({2}), GREEDY_TEMPERATURE)


def test_end_tokens_stop_unless_nothing_should() -> None:
    assert complete(PROMPT, SamplingWish(stop_ids=frozenset({7})), FACTS).stop_ids == {2, 7}
    assert complete(PROMPT, SamplingWish(stop_ids=frozenset()), FACTS).stop_ids == frozenset()


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        (SamplingWish(max_tokens=31), "max_tokens"),
        (SamplingWish(max_tokens=0), "max_tokens"),
        (SamplingWish(num_samples=0), "num_samples"),
        (SamplingWish(num_samples=129), "num_samples"),
        (SamplingWish(temperature=-1.0), "temperature"),
        (SamplingWish(temperature=float("nan")), "temperature"),
        (SamplingWish(stop_ids=frozenset({100})), "stop"),
        (SamplingWish(stop_ids=frozenset(range(65))), "stop"),
        (SamplingWish(stop_strings=("",)), "stop"),
        (SamplingWish(stop_strings=("x",) * 65), "stop"),
        (SamplingWish(topk_prompt_logprobs=101), "topk_prompt_logprobs"),
    ],
)
def test_values_out_of_range_are_refused(wish: SamplingWish, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        complete(PROMPT, wish, FACTS)
    assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, param)


@pytest.mark.parametrize("ids", [[], [100], [-1], [1] * 32])
def test_prompts_that_cannot_be_computed_are_refused(ids: list[int]) -> None:
    with pytest.raises(Refusal):
        complete(np.array(ids, np.int32), SamplingWish(), FACTS)
