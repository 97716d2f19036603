from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.accounting.events import RolloutArrived
from echo_hub.scoring.checks import SamplingBounds, check_payload
from echo_hub.scoring.stop_strings import StopStrings
from echo_shared.errors import RemoteProtocolError
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.sampling.interface import FinishedRollout
from echo_shared.wire.messages import FinishReason
from tests.echo_hub.written_rollouts import codec_of_bytes

CODEC = codec_of_bytes()
END = CODEC.stop_ids[0]


def ids(text: str, *more: int) -> np.ndarray:
    return np.array([*CODEC.encode_prompt(text).tolist(), *more], np.int32)


def stops(*strings: str) -> StopStrings:
    return StopStrings(strings, CODEC)


@pytest.mark.parametrize(
    ("strings", "text", "left"),
    [
        (("</a>",), "one</a>two</a>", "one</a>"),
        (("b", "a"), "xxaxbx", "xxa"),
        (("é",), "caféé", "café"),
        (("<end>",), "no", "no<end>"),
        (("\n\n",), "a\nb\n\n\nc", "a\nb\n\n"),
    ],
)
def test_a_completion_ends_with_the_token_that_makes_the_text(strings: tuple[str, ...], text: str, left: str) -> None:
    completion = ids(text, END)
    count = stops(*strings).end(completion)
    assert count is not None and CODEC.text(completion[:count]) == left
    assert stops(*strings).end(completion[: count - 1]) is None, "without that token the stop string is incomplete"
    assert stops(*strings).end(completion[:count]) == count


def test_most_completions_hold_none() -> None:
    assert stops().end(ids("abc")) is None and stops("x").end(ids("abc")) is None
    assert stops("x").end(np.empty(0, np.int32)) is None


def test_invalid_ids_have_no_text_and_are_fast() -> None:
    garbage = np.full(100_000, 2**31 - 1, np.int32)
    garbage[::2] = -5
    assert stops("x").end(garbage) is None
    garbage[77_000] = ids("x")[0]
    assert stops("x").end(garbage) == 77_001


def arrived(
    completion: np.ndarray, *, num_logprobs: int | None = None, problem: str = "", has_routes: bool = False
) -> RolloutArrived:
    count = len(completion)
    payload = RolloutPayload(
        completion_ids=completion,
        behavior_logprobs=-np.arange(count if num_logprobs is None else num_logprobs).astype(np.float32) / 9,
        finish_reason=FinishReason.LENGTH,
        sampling_s=0.5,
        spans=(
            DrawnSpan(node_id="a", policy_version=1, num_tokens=2),
            DrawnSpan(node_id="b", policy_version=2, num_tokens=2),
            DrawnSpan(node_id="b", policy_version=3, num_tokens=count - 4),
        ),
        routes=bytes(range(2 * count)) if has_routes else b"",
    )
    names = {"node_id": "b", "rollout_id": "1-0", "lease_id": 1, "group_id": 0, "index": 0}
    return RolloutArrived(**names, policy_version_start=1, policy_version_end=3, payload=payload, problem=problem)  # type: ignore[arg-type]


def test_a_completion_is_truncated_with_all_its_token_data() -> None:
    event = stops("c").arrived(arrived(ids("abcdefg"), has_routes=True))
    assert event.payload.routes == bytes(range(6))
    assert CODEC.text(event.payload.completion_ids) == "abc"
    assert event.payload.behavior_logprobs.tolist() == pytest.approx([0, -1 / 9, -2 / 9])
    assert event.payload.finish_reason is FinishReason.STOP
    assert [(span.node_id, span.num_tokens) for span in event.payload.spans] == [("a", 2), ("b", 1)]


def test_completions_without_a_stop_string_are_unchanged() -> None:
    for event in (
        arrived(ids("abcdefg")),
        arrived(ids("xbcdefg"), num_logprobs=3),
        arrived(ids("xbcdefg"), problem="what cannot be"),
    ):
        assert stops("x").arrived(event) is event


def test_the_hubs_own_completions_are_truncated_too() -> None:
    drawn = FinishedRollout(
        lease_id=1,
        group_id=0,
        index=0,
        policy_version=0,
        completion_ids=ids("abcd"),
        behavior_logprobs=np.zeros(4, np.float32),
        finish_reason=FinishReason.LENGTH,
        sampling_s=0.0,
        routes=b"abcd",
    )
    cut = stops("b").finished(drawn)
    assert cut.routes == b"ab"
    assert (CODEC.text(cut.completion_ids), len(cut.behavior_logprobs), cut.finish_reason) == ("ab", 2, "stop")
    assert stops("x").finished(drawn) is drawn


def test_a_stop_at_a_missing_stop_string_is_refused() -> None:
    bounds = SamplingBounds(
        vocabulary_size=CODEC.num_ids, max_tokens=9, stop_ids=frozenset({END}), stop_strings=stops("c")
    )
    check_payload(stops("c").arrived(arrived(ids("abcdefghi"))).payload, bounds)
    for text in ("abd", "acb"):  # A node would have cut the second text earlier, at its stop string.
        payload = RolloutPayload(
            completion_ids=ids(text),
            behavior_logprobs=np.full(3, -0.5, np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=0.0,
        )
        with pytest.raises(RemoteProtocolError, match="claims to have stopped"):
            check_payload(payload, bounds)
