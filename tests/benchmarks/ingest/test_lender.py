"""A real hub accepts the frames that the ingest benchmark sends."""

from __future__ import annotations

import pytest

from benchmarks.ingest.cases import FRAMES, MOST_TOKENS
from benchmarks.ingest.lender import VARIANTS, Completions
from echo_hub.scoring.checks import SamplingBounds, check_payload
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.codec import decode_from_node
from echo_shared.wire.messages import Rollout

LEASE = {"lease_id": 12, "group_id": 7, "policy_version": 3}


@pytest.mark.parametrize("frame_bytes", FRAMES)
def test_a_frame_is_a_rollout_that_could_have_been_drawn(frame_bytes: int) -> None:
    completions = Completions(frame_bytes, 1, seed=0)
    bounds = SamplingBounds(vocabulary_size=99, max_tokens=MOST_TOKENS, stop_ids=frozenset({1}))
    for _ in range(VARIANTS):
        rollout_id, frame = completions.frame(LEASE, 5)
        assert abs(len(frame) - frame_bytes) < 0.06 * frame_bytes
        rollout = decode_from_node(frame)
        assert isinstance(rollout, Rollout)
        assert (rollout.rollout_id, rollout.index, rollout.policy_version_end) == (rollout_id, 5, 3) == ("12-5", 5, 3)
        payload = RolloutPayload(
            completion_ids=rollout.completion_ids,
            behavior_logprobs=rollout.behavior_logprobs,
            finish_reason=rollout.finish_reason,
            sampling_s=rollout.sampling_s,
        )
        check_payload(payload, bounds)


def test_the_same_seed_sends_the_same() -> None:
    first, second, other = (Completions(2_000, 1, seed=seed).frame(LEASE, 0)[1] for seed in (4, 4, 5))
    assert first == second != other
