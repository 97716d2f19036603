from __future__ import annotations

import numpy as np

from echo_hub.core.payload import Span
from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.verify.drawn import DrawnRollout, pack, pack_evidence, unpack, unpack_evidence, unpack_spans
from echo_shared.child import HEADER_BYTES, pack_frame, unpack_frame


def test_a_rollout_is_unchanged_by_a_frame() -> None:
    drawn = DrawnRollout(
        rollout_id="3-1",
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([5, 6, 7], np.int32),
        behavior_logprobs=np.array([-0.5, -1.5, -2.5], np.float32),
        spans=(Span(node_id="a", policy_version=1, num_tokens=2), Span(node_id="b", policy_version=4, num_tokens=1)),
        seed=2**64 - 1,
        index=1,
    )
    found = unpack(unpack_frame(pack_frame(pack(drawn))[HEADER_BYTES:]))
    for name in DrawnRollout.__slots__:
        one, other = getattr(found, name), getattr(drawn, name)
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
