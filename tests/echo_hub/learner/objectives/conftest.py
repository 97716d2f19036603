"""Tokens with given probability ratios, in float64; and the loss and gradient of an objective for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens

BEHAVIOR_LOGPROB = -1.0


@pytest.fixture
def make_tokens() -> Callable[..., ObjectiveTokens]:
    """Return a function that makes tokens. `ratios`: probability under the learner's policy over that under the
    behaviour policy. `proximal`: the same ratio for the proximal policy; None: the proximal policy is the learner's.
    """

    def make(
        ratios: Sequence[float] | Tensor,
        advantages: Sequence[float],
        *,
        proximal: Sequence[float] | None = None,
        old: str = "behavior",
        rollouts: Sequence[int] | None = None,
    ) -> ObjectiveTokens:
        learner = torch.as_tensor(ratios, dtype=torch.float64).log() + BEHAVIOR_LOGPROB
        if not learner.requires_grad:
            learner.requires_grad_()
        behavior = torch.full((len(advantages),), BEHAVIOR_LOGPROB, dtype=torch.float64)
        known = learner.detach() if proximal is None else torch.tensor(proximal, dtype=torch.float64).log() + behavior
        numbers = torch.tensor(rollouts if rollouts is not None else range(len(advantages)), dtype=torch.int64)
        return ObjectiveTokens(
            learner_logprobs_N=learner,
            old_logprobs_N=behavior if old == "behavior" else known,
            proximal_logprobs_N=known,
            behavior_logprobs_N=behavior,
            advantages_N=torch.tensor(advantages, dtype=torch.float64),
            rollouts_N=numbers,
            lengths=torch.bincount(numbers).tolist(),
        )

    return make


@pytest.fixture
def gradient() -> Callable[[Objective, ObjectiveTokens], list[float]]:
    """Return the gradient of the sum of losses by each token's log-probability."""

    def of(objective: Objective, tokens: ObjectiveTokens) -> list[float]:
        (values,) = torch.autograd.grad(objective.losses(tokens).losses_N.sum(), tokens.learner_logprobs_N)
        result: list[float] = values.tolist()
        return result

    return of


@pytest.fixture
def check_gradient(make_tokens: Callable[..., ObjectiveTokens]) -> Callable[..., None]:
    """Compare an objective's gradient with finite differences in float64, away from the kinks of min and clip."""

    def check(objective: Objective, ratios: Sequence[float], advantages: Sequence[float], **given: object) -> None:
        start = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()

        def loss(logs: Tensor) -> Tensor:
            return objective.losses(make_tokens(logs.exp(), advantages, **given)).losses_N

        assert torch.autograd.gradcheck(loss, (start,), eps=1e-6, atol=1e-7)

    return check
