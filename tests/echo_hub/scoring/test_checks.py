from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_hub.core.payload import RolloutPayload
from echo_hub.scoring.checks import LOGPROB_SLACK, SamplingBounds, check_payload
from echo_shared.errors import RemoteProtocolError
from echo_shared.messages import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
BOUNDS = SamplingBounds(vocabulary_size=10, max_tokens=4, stop_ids=frozenset({1, 9}))


def payload(ids: list[int], reason: FinishReason, logprobs: Any = None) -> RolloutPayload:
    return RolloutPayload(
        completion_ids=np.array(ids, np.int32),
        behavior_logprobs=np.array([-0.5] * len(ids) if logprobs is None else logprobs, np.float32),
        finish_reason=reason,
        sampling_s=0.0,
    )


@pytest.mark.parametrize(
    "honest",
    [
        payload([1], STOP),
        payload([0, 8, 9], STOP),
        payload([2, 3, 4, 1], STOP),
        payload([2, 3, 4, 5], LENGTH),
        payload([2, 1], STOP, [0.0, LOGPROB_SLACK / 2]),
        payload([2, 1], STOP, [-1e30, -0.0]),
    ],
)
def test_an_honest_completion_passes(honest: RolloutPayload) -> None:
    check_payload(honest, BOUNDS)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (payload([], STOP), "wrong length"),
        (payload([2, 3, 4, 5, 1], STOP), r"(?s)wrong length.*5 tokens of 4"),
        (payload([2, 1], STOP, [-0.5]), r"(?s)one logprob a token.*1 for 2"),
        (payload([2, 1], STOP, [-0.5] * 3), "one logprob a token"),
        (payload([-1, 1], STOP), "not in the vocabulary"),
        (payload([10, 1], STOP), r"(?s)not in the vocabulary.*1 to 10"),
        (payload([2, 1], STOP, [-0.5, 0.01]), "above zero"),
        (payload([9, 3, 1], STOP), "goes on after its stop token"),
        (payload([9, 9], STOP), "goes on after its stop token"),
        (payload([2, 3], STOP), r"(?s)claims to have stopped.*3"),
        (payload([2, 3], LENGTH), r"(?s)cut at its length.*2 tokens"),
        (payload([2, 3, 4, 9], LENGTH), "cut at its length"),
    ],
)
def test_what_no_honest_backend_sends_is_refused(bad: RolloutPayload, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        check_payload(bad, BOUNDS)
