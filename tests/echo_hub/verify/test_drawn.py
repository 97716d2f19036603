from __future__ import annotations

from dataclasses import fields

import numpy as np

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.verify.drawn import DrawnRollout, pack_evidence, unpack_evidence, unpack_spans
from echo_shared.process.child import HEADER_BYTES, pack_frame, unpack_frame
from echo_shared.records.rollout import DrawnSpan, pack_payload, unpack_payload
from echo_shared.wire.messages import FinishReason


def test_a_rollout_is_unchanged_by_a_frame() -> None:
    drawn = DrawnRollout(
        rollout_id="3-1",
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([5, 6, 7], np.int32),
        behavior_logprobs=np.array([-0.5, -1.5, -2.5], np.float32),
        spans=(
            DrawnSpan(node_id="a", policy_version=1, num_tokens=2),
            DrawnSpan(node_id="b", policy_version=4, num_tokens=1),
        ),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
        seed=2**64 - 1,
        index=1,
    )
    found = unpack_payload(DrawnRollout, unpack_frame(pack_frame(pack_payload(drawn))[HEADER_BYTES:]))
    for field in fields(DrawnRollout):
        one, other = getattr(found, field.name), getattr(drawn, field.name)
        if isinstance(other, np.ndarray):
            assert (one.tolist(), one.dtype) == (other.tolist(), other.dtype)
        else:
            assert one == other


def test_evidence_is_unchanged_by_a_frame() -> None:
    shown = Evidence.of([0.0, 0.3], [-0.5, -2.0], [0.25, 0.9], [-0.5, -7.0])
    found = unpack_evidence(unpack_frame(pack_frame(pack_evidence(shown))[HEADER_BYTES:]))
    assert found == shown and hash(found) == hash(shown)


def test_spans_are_unchanged_by_a_frame() -> None:
    spans = (("a", Evidence.of([0.0], [-0.5], [0.25], [-0.5])), ("b", NO_EVIDENCE))
    frames = [{"node_id": node_id, **pack_evidence(shown)} for node_id, shown in spans]
    assert unpack_spans(unpack_frame(pack_frame({"spans": frames})[HEADER_BYTES:])["spans"]) == spans
