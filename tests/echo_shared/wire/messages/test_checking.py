"""The messages of a check: the lease, in which a hub asks a node to check another node's completion, and the result."""

from typing import Any

import numpy as np
import pytest

from echo_shared.wire.messages import CheckLease, CheckResult
from tests.echo_shared.wire.messages.examples import CHECK


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": np.zeros(0, np.int32)},
        {"completion_ids": np.zeros(3, np.int32)},
        {"versions": ()},
    ],
)
def test_a_check_without_a_prompt_or_a_version_of_each_token_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        CheckLease(**{**dict(CHECK), **wrong})


@pytest.mark.parametrize(("below", "logprobs"), [([0.5], [-1, -1]), ([-0.1], [-1]), ([1.1], [-1]), ([0.5], [np.nan])])
def test_a_check_is_answered_with_probabilities(below: list[float], logprobs: list[float]) -> None:
    with pytest.raises(ValueError):
        CheckResult(rollout_id="3-5", below=np.array(below, np.float32), logprobs=np.array(logprobs, np.float32))
