from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_hub.learner.screen import ScreenedTokens, ScreenFindings, count, impossible
from echo_shared.sampling import draws


def tokens(
    claims: list[float], learner: list[float], distances: list[float] | None = None, **given: Any
) -> ScreenedTokens:
    return ScreenedTokens(
        claims_N=np.array(claims, np.float32),
        learner_logprobs_N=np.array(learner, np.float32),
        distances_N=np.array([0.0] * len(claims) if distances is None else distances, np.float32),
        lengths=given.get("lengths", [len(claims)]),
    )


@pytest.mark.parametrize(
    ("claims", "learner", "out"),
    [
        ([-0.5] * 3, [-0.5] * 3, False),
        ([-19.5, -0.1], [-0.1, -0.1], True),
        ([-10.0] * 3, [-1.0] * 3, True),
        ([-10.0], [-0.1], False),  # A single token of probability 1/20,000 proves nothing.
        # Thirty claims far above the learner's log-probabilities must not make up for one that is impossibly low.
        ([-19.5, *[0.0] * 30], [-0.1, *[-25.0] * 30], True),
        # Claims that are too high only lower the tokens' weight in training, and low-bit engines may deviate this far.
        ([0.0] * 50, [-30.0] * 50, False),
        ([-0.5] * 2000, [-0.46] * 2000, False),  # Each claim differs by less than `SLACK`.
        ([-1.0], [float("nan")], False),
    ],
)
def test_claims(claims: list[float], learner: list[float], out: bool) -> None:
    assert impossible(tokens(claims, learner)).tolist() == [out]


@pytest.mark.parametrize(
    ("distances", "out"),
    [
        ([0.9, 0.9, 0.9], False),
        ([0.9] * 6, True),
        (([0.0] * 4 + [0.3]) * 10, False),
        (([0.0] * 4 + [0.4]) * 40, True),
        ([1e-3] * 10_000, False),  # An engine with other rounding, on a flat distribution over a large vocabulary.
        ([float("nan")] * 100, False),
    ],
)
def test_draws(distances: list[float], out: bool) -> None:
    flat = [-1.0] * len(distances)
    assert impossible(tokens(flat, flat, distances)).tolist() == [out]


def test_each_rollout_is_judged_by_its_own_tokens() -> None:
    found = impossible(tokens([-0.5, -0.5, -19.5, -0.5], [-0.5] * 4, lengths=[2, 1, 1]))
    assert found.tolist() == [False, True, False]


def test_an_honest_draw_from_another_policy_is_kept() -> None:
    rng = np.random.default_rng(0)
    count_, vocabulary = 4_000, 50
    drawer, learner = (rng.standard_normal((count_, vocabulary)) for _ in range(2))
    drawn, claims = draws.draw(2 * drawer.astype(np.float32), rng.random(count_), 1.0)
    logprobs = 2 * learner - np.log(np.exp(2 * learner).sum(axis=1, keepdims=True))
    given = tokens(list(claims), list(logprobs[np.arange(count_), drawn]), [np.nan] * count_, lengths=[8] * 500)
    assert not impossible(given).any()


def test_counts_by_rollout_and_turn() -> None:
    given = tokens(
        [-1.0, -1.0, -1.0, -2.0, -1.0],
        [-1.0, -1.03, -3.0, -2.0, -1.0],
        [0.0, 0.01, 0.3, 0.005, np.nan],
        lengths=[3, 1, 1],
    )
    counts = count(given, np.array([0, 0, 1, 0, 0]))
    assert counts.keys() == {(0, 0), (0, 1), (1, 0)}, "tokens sampled with an unknown u are not counted"
    assert counts[0, 0][:2] == ([1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0])
    assert counts[0, 1][:2] == ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1])
    assert counts[1, 0] == ([0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], 0.0)
    assert counts[0, 1][2] == pytest.approx(np.exp(-2) - 1 + 2)


def test_findings_are_reported_by_place_among_all_turns() -> None:
    found = ScreenFindings(left_out={2, 0}, suspects={1})
    found.add_counts([{"counts": [[1, 1, [1], [2], 0.5]]}, {"counts": [[0, 0, [3], [4], 0.25]]}])
    assert found.frame([1, 2, 1]) == {
        "left_out": [0, 2],
        "suspects": [1, 2],
        "screened": [0, 2],
        "draws": [[3], [1]],
        "claims": [[4], [2]],
        "mismatch_kl": [0.25, 0.5],
    }
    again = ScreenFindings()
    again.add_counts([{"counts": found.packed_counts()}])
    assert again.counts == found.counts
