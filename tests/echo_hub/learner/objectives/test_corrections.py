from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.base import ObjectiveTokens
from echo_hub.learner.objectives.corrections import correct

RATIOS = [0.1, 0.6, 1.0, 1.9, 3.0]


@pytest.mark.parametrize(
    ("settings", "weights", "bounded"),
    [
        ({}, [1, 1, 1, 1, 1], [False] * 5),
        ({"correction": "tis"}, [0.1, 0.6, 1, 1.9, 2], [False] * 4 + [True]),
        ({"correction": "tis", "correction_high": 1.5}, [0.1, 0.6, 1, 1.5, 1.5], [False] * 3 + [True] * 2),
        ({"correction": "masked_is"}, [0, 0.6, 1, 1.9, 0], [True, False, False, False, True]),
        ({"correction": "masked_is", "correction_low": 0.0, "correction_high": 5.0}, RATIOS, [False] * 5),
    ],
)
def test_weights_by_hand(
    make_tokens: Callable[..., ObjectiveTokens], settings: dict[str, Any], weights: list[float], bounded: list[bool]
) -> None:
    # The learner has moved away from the proximal policy (ratio 9), which the correction must ignore.
    tokens = make_tokens([9.0] * 5, [1.0] * 5, proximal=RATIOS)
    found = correct(tokens, ObjectiveConfig(old_policy="proximal", **settings))
    assert found.weights_N.tolist() == pytest.approx(weights)
    assert found.bounded_N.tolist() == bounded
    assert not found.weights_N.requires_grad
    assert not found.vetoed_R.any()


def test_one_token_vetoes_its_rollout(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    tokens = make_tokens([1.0, 5e-5, 1.0, 2e-4], [1.0] * 4, rollouts=[0, 0, 1, 1])
    assert correct(tokens, ObjectiveConfig(sequence_veto=1e-4)).vetoed_R.tolist() == [True, False]
    assert correct(tokens, ObjectiveConfig(sequence_veto=1e-3)).vetoed_R.tolist() == [True, True]
    assert correct(tokens, ObjectiveConfig()).vetoed_R.tolist() == [False, False]


def test_the_sequence_mask_by_hand(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    """With μ the behaviour and π the learner's policy, the mean of log(μ / π) is log 4 / 2 = 0.69, -0.69 and 0.69 for
    the three rollouts. Tokens of positive advantage are never masked.
    """
    ratios = [0.25, 1.0, 4.0, 1.0, 0.25, 1.0]
    tokens = make_tokens(ratios, [-1.0, -1.0, -1.0, -1.0, 2.0, -1.0], rollouts=[0, 0, 1, 1, 2, 2])
    found = correct(tokens, ObjectiveConfig(sequence_mask=0.5))
    assert found.masked_N.tolist() == [True, True, False, False, False, True]
    assert not found.vetoed_R.any()
    for off in (ObjectiveConfig(sequence_mask=0.7), ObjectiveConfig()):
        assert not correct(tokens, off).masked_N.any()
