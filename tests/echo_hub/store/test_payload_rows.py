"""The columns that store a rollout's tokens must keep every field of the rollout's payload."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np

from echo_hub.store.payload_rows import NAMES, columns, payload_of, row_of
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.sampling.interface import FinishedRollout
from echo_shared.wire.messages import CONTENT, FinishReason, Rollout

PAYLOAD = RolloutPayload(
    completion_ids=np.array([3, 2**31 - 1], np.int32),
    behavior_logprobs=np.array([-0.5, -1.5], np.float32),
    finish_reason=FinishReason.LENGTH,
    sampling_s=0.25,
    observation_ids=np.array([7], np.int32),
    spans=(DrawnSpan(node_id="a", policy_version=1, num_tokens=2),),
    routes=bytes([0, 255, 3, 4]),
)


def test_a_row_gives_its_payload_back() -> None:
    answer = np.array([7], "<i4").tobytes()
    found = payload_of(SimpleNamespace(**row_of(PAYLOAD), observation_ids=answer))
    for field in fields(RolloutPayload):
        one, other = getattr(found, field.name), getattr(PAYLOAD, field.name)
        if isinstance(other, np.ndarray):
            assert (one.tolist(), one.dtype) == (other.tolist(), other.dtype)
        else:
            assert (one, type(one)) == (other, type(other))


def test_null_stands_for_a_fields_default() -> None:
    row = SimpleNamespace(**row_of(replace(RolloutPayload.of(PAYLOAD), routes=b"")), observation_ids=None)
    assert row.spans is None and row.routes is None
    found = payload_of(row)
    assert found.observation_ids.tolist() == [] and found.spans == () and found.routes == b""
    assert {each.name for each in columns() if each.nullable} >= {"observation_ids", "spans"}
    assert not any(each.nullable for each in columns() if each.name in ("completion_ids", "finish_reason"))


def test_spans_that_are_not_stored_are_those_of_the_lease() -> None:
    row = row_of(RolloutPayload.of(PAYLOAD)) | {"observation_ids": None, "node_id": "b", "policy_version": 4}
    found = payload_of(SimpleNamespace(**row), is_attributed=True)
    assert found.spans == (DrawnSpan(node_id="b", policy_version=4, num_tokens=2),)
    own = row_of(PAYLOAD) | {"observation_ids": None, "node_id": "b", "policy_version": 4}
    assert payload_of(SimpleNamespace(**own), is_attributed=True).spans == PAYLOAD.spans


def test_all_forms_of_a_rollout_have_a_completions_fields() -> None:
    assert set(CONTENT) <= set(Rollout.model_fields) & {field.name for field in fields(FinishedRollout)} & set(NAMES)
