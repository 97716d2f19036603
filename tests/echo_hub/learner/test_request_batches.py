from __future__ import annotations

import numpy as np
import pytest

from echo_hub.learner.request_batches import batches
from echo_shared.sampling.interface import GroupRequest


def request(rollouts: int, prompt: int, max_tokens: int) -> GroupRequest:
    return GroupRequest(
        lease_id=0,
        group_id=0,
        indices=tuple(range(rollouts)),
        prompt_ids=np.zeros(prompt, np.int32),
        seed=0,
        policy_version=0,
        temperature=1.0,
        max_tokens=max_tokens,
        stop_ids=(),
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([], []), ([4, 4, 2], [(0, 3)]), ([4, 4, 3], [(0, 2), (2, 3)]), ([99, 1, 99], [(0, 1), (1, 2), (2, 3)])],
)
def test_consecutive_requests_are_batched_as_far_as_they_fit(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    requests = [request(1, size - 1, 1) for size in sizes]
    assert [(part.start, part.stop) for part in batches(requests, 10)] == expected


def test_every_rollout_of_a_group_counts_with_its_prompt() -> None:
    assert len(list(batches([request(2, 3, 2), request(2, 3, 2)], 20))) == 1
    assert len(list(batches([request(2, 3, 2), request(2, 3, 2)], 19))) == 2
