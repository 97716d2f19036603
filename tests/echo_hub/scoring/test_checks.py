from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_hub.run.experts import Experts
from echo_hub.scoring.checks import LOGPROB_SLACK, SamplingBounds, check_payload, log_chance
from echo_shared.errors import RemoteProtocolError
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import NO_ROUTE, FinishReason

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
        payload([2, 1], STOP, [-20.0, -0.0]),
        payload([2, 3, 4, 5], LENGTH, [-2.3] * 4),
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
        (payload([2, 1], STOP, [-1e30, -0.0]), r"(?s)No fair draw.*2 tokens, the lowest: -10+.*, -0.0"),
        (payload([2, 3, 1], STOP, [-19.5, -19.5, -0.1]), r"(?s)No fair draw.*-19.5, -19.5, -0.1"),
        (payload([2, 3, 4, 1], STOP, [-12.0] * 4), "No fair draw"),
        (payload([2, 1], STOP, [float("nan"), -0.1]), r"(?s)not a number.*nan"),
        (payload([2, 1], STOP, [-0.1, float("-inf")]), r"(?s)not a number.*-inf"),
        (payload([9, 3, 1], STOP), "goes on after its stop token"),
        (payload([9, 9], STOP), "goes on after its stop token"),
        (payload([2, 3], STOP), r"(?s)claims to have stopped.*3"),
        (payload([2, 3], LENGTH), r"(?s)cut at its length.*2 tokens"),
        (payload([2, 3, 4, 9], LENGTH), "cut at its length"),
    ],
)
def test_payloads_that_no_honest_backend_sends_are_refused(bad: RolloutPayload, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        check_payload(bad, BOUNDS)


def test_the_chance_by_hand() -> None:
    """Compare with values computed by hand. The excess of a token is -logprob minus the log of the vocabulary's size.
    With a vocabulary of one token, the excess is -logprob itself."""
    one = np.array([-30.0], np.float32)
    assert log_chance(one, 1) == pytest.approx(-30 + np.log(2) + np.log(2))
    two = np.array([-30.0, -20.0, 0.0, 0.0], np.float32)
    of_both = np.log(6) - 50 + np.log(50) - np.log(1 - 1 / 50) + np.log(6) + np.log(12)
    assert log_chance(two, 1) == pytest.approx(of_both, abs=1e-6)
    assert log_chance(two, 99) > log_chance(two, 1)
    assert log_chance(np.array([-0.5, -2.0], np.float32), 8) == 0.0


@pytest.mark.parametrize(("temperature", "vocabulary"), [(0.5, 99), (1.0, 32_000), (10.0, 151_936)])
@pytest.mark.parametrize("length", [3, 1_000, 131_072])
def test_a_fair_draw_passes_at_any_temperature_vocabulary_and_length(
    temperature: float, vocabulary: int, length: int
) -> None:
    rng = np.random.default_rng(0)
    scaled = rng.standard_normal(vocabulary) * 8 / temperature
    logprobs = scaled - np.logaddexp.reduce(scaled)
    drawn = rng.choice(vocabulary, length, p=np.exp(logprobs))
    assert log_chance(logprobs[drawn].astype(np.float32), vocabulary) == pytest.approx(0, abs=3)


def test_the_worst_honest_model_is_refused_within_the_bound() -> None:
    """Draw completions of the worst honest model, with exponentially distributed negative log-probabilities. For each
    length, the computed chance may be below .05 for at most 5 % of the completions."""
    rng = np.random.default_rng(1)
    below = [
        sum(log_chance(-rng.standard_exponential(length).astype(np.float32), 1) < np.log(0.05) for _ in range(2_000))
        for length in (1, 4, 64)
    ]
    assert max(below) < 2_000 * 0.05
    assert below[0] > 0, "the bound is tight enough to matter"


def test_the_claims_that_a_forger_needs_are_refused() -> None:
    """Refuse log-probabilities that a forger must claim for a wanted completion: with the built-in vocabulary, two
    digits at -19.5 nats or sixteen tokens at -10; with a large vocabulary, eight tokens at -20."""

    def refused(logprob: float, count: int, vocabulary: int) -> bool:
        return log_chance(np.full(count, logprob, np.float32), vocabulary) < np.log(1e-9)

    assert [refused(-19.5, count, 99) for count in (1, 2)] == [False, True]
    assert [refused(-10, count, 99) for count in (3, 16)] == [False, True]
    assert [refused(-20, count, 151_936) for count in (2, 8)] == [False, True]


WITH_EXPERTS = replace(BOUNDS, experts=Experts(count=4, most_route_bytes=6))
HONEST = payload([2, 3, 1], STOP)


@pytest.mark.parametrize("routes", [b"", bytes(18), bytes(12), bytes([3, 0] * 2 + [NO_ROUTE] * 2)])
def test_routes_of_the_base_pass(routes: bytes) -> None:
    check_payload(replace(HONEST, routes=routes), WITH_EXPERTS)


@pytest.mark.parametrize(
    ("routes", "bounds", "why"),
    [
        (bytes(18), BOUNDS, "does not ask for"),
        (bytes(17), WITH_EXPERTS, "(?s)wrong size.*17 bytes for 3 tokens"),
        (bytes(21), WITH_EXPERTS, "(?s)wrong size.*at most 6 for each"),
        (bytes([0, 1, 4]), WITH_EXPERTS, "(?s)does not have.*4"),
        (bytes([NO_ROUTE - 1] * 3), WITH_EXPERTS, "(?s)does not have.*254"),
    ],
)
def test_routes_that_no_node_can_have_are_refused(routes: bytes, bounds: SamplingBounds, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        check_payload(replace(HONEST, routes=routes), bounds)
