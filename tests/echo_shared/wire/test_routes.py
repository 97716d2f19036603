from __future__ import annotations

import numpy as np
import pytest

from echo_shared.wire.messages import Completion, FinishReason
from echo_shared.wire.routes import bytes_per_token, fit, joined_routes, own_routes, routes_of


def completion(tokens: int, routes: bytes) -> Completion:
    return Completion(
        completion_ids=np.zeros(tokens, np.int32),
        behavior_logprobs=np.zeros(tokens, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.0,
        routes=routes,
    )


THREE = completion(3, b"abcdef")


@pytest.mark.parametrize(
    ("one", "size", "is_fit"),
    [
        (THREE, 2, True),
        (completion(3, b""), 0, True),
        (completion(3, b"abcd"), 1, False),
        (completion(0, b""), 0, True),
        (completion(0, b"a"), 1, False),
    ],
)
def test_size_and_fit(one: Completion, size: int, is_fit: bool) -> None:
    assert (bytes_per_token(one), fit(one)) == (size, is_fit)


@pytest.mark.parametrize(("count", "expected"), [(0, b""), (1, b"ab"), (3, b"abcdef"), (9, b"abcdef")])
def test_first_tokens(count: int, expected: bytes) -> None:
    assert routes_of(THREE, count) == expected
    assert routes_of(completion(3, b"abcd"), count) == b"", "routes that do not fit"


@pytest.mark.parametrize(
    ("given", "expected"), [(0, b"abcdef"), (1, b"\xff\xffcdef"), (3, b"\xff" * 6), (9, b"\xff" * 6)]
)
def test_tokens_that_another_node_computed_have_no_route(given: int, expected: bytes) -> None:
    assert own_routes(THREE, given) == expected
    assert own_routes(completion(3, b"abcd"), given) == b"abcd", "left for the check that refuses it"
    assert own_routes(completion(0, b""), given) == b""


def test_an_episode_by_hand() -> None:
    last = completion(1, b"xy")
    assert joined_routes([(THREE, 2), (last, 0)]) == b"abcdef" + b"\xff" * 4 + b"xy"
    assert joined_routes([(completion(2, b""), 1), (last, 0)]) == b"\xff" * 6 + b"xy"
    assert joined_routes([(completion(2, b""), 1)]) == b""
    assert joined_routes([(THREE, 0), (completion(1, b"xyz"), 0)]) == b"", "engines of different models"
