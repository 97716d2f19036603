from typing import Any

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub
from echo_shared.wire.messages import MAX_GROUP_SIZE, MAX_PREFIX_TOKENS, MAX_VERSION_SPANS
from echo_shared.wire.messages.fields import MAX_TOKENS
from tests.echo_shared.wire.messages.examples import CONTINUED, LEASE, array, changed, part


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2**64 - 1, "lease_id": -1},
        {"lease_id": 2**53 + 1},
        {"lease_id": "3"},
        {"lease_id": 3.0},
        {"lease_id": True},
        {"lease_id": ...},
        {"indices": []},
        {"indices": [0] * 1_025},
        {"indices": [-1]},
        {"indices": {"0": 1}},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"max_tokens": 0},
        {"max_tokens": MAX_TOKENS + 1},
        {"policy_version": -1},
        {"deadline_s": 0},
        {"prompt_ids": [1, 2]},
        {"prompt_ids": array([1], "<i8")},
        {"prompt_ids": array([1], "<f4")},
        {"prompt_ids__dtype": "|O"},
        {"prompt_ids__shape": [4]},
        {"prompt_ids__shape": [-3]},
        {"prompt_ids__shape": [True, 3]},
        {"prompt_ids__shape": [3, 1]},
        {"prompt_ids__data": b"\x00"},
        {"prompt_ids__data": ...},
        {"prompt_ids": array([0] * (MAX_TOKENS + 1), "<i4")},
        {"type": "no_such_message"},
        {"type": 3},
        {"type": ...},
    ],
    ids=str,
)
def test_a_lease_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(LEASE, **fields))


@pytest.mark.parametrize(
    "prefixes",
    [
        [part(1)] * (MAX_GROUP_SIZE + 1),
        [part(MAX_PREFIX_TOKENS // 2), part(MAX_PREFIX_TOKENS // 2), part(1)],
        [part(1, index=-1)],
        [part(1, logprobs=array([float("nan")], "<f4"))],
        [part(3, versions=[{"policy_version": 1, "num_tokens": 2}])],
        [part(3, versions=[{"policy_version": 1, "num_tokens": 3}, {"policy_version": 2, "num_tokens": 0}])],
        [part(3, versions=[{"policy_version": -1, "num_tokens": 3}])],
        [part(MAX_VERSION_SPANS + 1, versions=[{"policy_version": 1, "num_tokens": 1}] * (MAX_VERSION_SPANS + 1))],
        [{"index": 1}],
        None,
    ],
    ids=lambda prefixes: str(prefixes)[:40],
)
def test_prefixes_out_of_bounds_are_refused(prefixes: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(CONTINUED, prefixes=prefixes))


def test_an_error_says_where() -> None:
    with pytest.raises(CodecError, match="temperature"):
        decode_from_hub(changed(LEASE, temperature=-1.0))
