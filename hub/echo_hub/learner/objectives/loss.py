"""The loss of a step: an objective, corrected, with a KL term and an entropy bonus.

    Σ_t weight_t (1 - veto) (correction_t (1 - mask) l_t + β (π_ref / π_θ - log(π_ref / π_θ) - 1) - α H_t)

The sum is over trained tokens; l_t is the objective's loss of token t. veto and mask are 1 for tokens that
`corrections` removes, else 0. β is objective.kl_coefficient. π_ref is the reference policy, usually the base model.
Source of the KL term: GRPO (DeepSeekMath, arXiv 2402.03300, eq. 4). As there, the term ignores that another policy than
π_θ drew the tokens. Its value estimates KL(π_θ ‖ π_ref). Its gradient, (1 - π_ref / π_θ) ∇ log π_θ for each token, has
the mean ∇ KL(π_ref ‖ π_θ): it pulls towards everything that the reference finds likely. Departure: above log(π_ref /
π_θ) = MAX_KL_LOG_RATIO the term is a straight line.

H_t is the entropy of the whole distribution of π_θ at the sampling temperature, at the token's position. The bonus also
ignores that another policy than π_θ reached these positions. `echo_hub.learner.entropy` computes α. Source of the
bonus: A3C (arXiv 1602.01783, section 4).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.batch import MicroBatch
from echo_hub.learner.objectives.base import ObjectiveTokens, k3, ratio
from echo_hub.learner.objectives.corrections import correct, in_rollouts
from echo_hub.learner.objectives.registry import make_objective


class Statistics(NamedTuple):
    """Figures of one micro-batch that add up to a step's metrics. All are sums over tokens or rollouts, except the last
    one, a maximum. `StepLoss` returns them as a tensor, in this order."""

    loss: float
    tokens: float
    ratio: float
    clipped: float
    mismatch_kl: float
    correction_weight: float
    corrected: float
    vetoed_rollouts: float
    base_kl: float
    entropy: float
    ratio_max: float


STATISTICS: Final = Statistics._fields

MAX_KL_LOG_RATIO: Final = 3.0
"""Log-ratio log(π_ref / π_θ) up to which the KL term is exact; beyond it the term is a straight line. So the KL
gradient of a token is at most e³ - 1 = 19 times β (objective.kl_coefficient). With GRPO's β = 0.04, a token that the
reference finds far likelier than the learner does not outweigh an advantage of 1."""


class StepLoss:
    """The loss of one step. `entropy_coefficient` is the step's entropy weight α; None means the value in the
    settings.
    """

    def __init__(self, settings: ObjectiveConfig, *, entropy_coefficient: float | None = None) -> None:
        self._settings = settings
        self._entropy_coefficient = settings.entropy_coefficient if entropy_coefficient is None else entropy_coefficient
        self.needs_entropy_gradient = self._entropy_coefficient > 0
        self._objective = make_objective(settings)
        self.needs_proximal = (
            settings.old_policy == "proximal" or settings.name == "decoupled_ppo" or settings.sequence_veto > 0
        )
        """True if the loss uses the log-probabilities at the start of the step."""
        self.needs_reference = settings.kl_coefficient > 0

    def __call__(
        self,
        batch: MicroBatch,
        learner_logprobs_N: Tensor,
        *,
        proximal_logprobs_N: Tensor | None = None,
        reference_logprobs_N: Tensor | None = None,
        entropies_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's part of the loss, and its `Statistics` as one tensor (float32, same device, no
        graph).

        A micro-batch without tokens is allowed. `proximal_logprobs_N` None means that the learner has not changed since
        the start of the step. `entropies_N` are the entropies of the learner's distributions, in nats; they have a
        graph if `needs_entropy_gradient` is True. None counts as entropy 0.
        """
        proximal_N = learner_logprobs_N.detach() if proximal_logprobs_N is None else proximal_logprobs_N
        tokens = ObjectiveTokens(
            learner_logprobs_N=learner_logprobs_N,
            old_logprobs_N=proximal_N if self._settings.old_policy == "proximal" else batch.behavior_logprobs_N,
            proximal_logprobs_N=proximal_N,
            behavior_logprobs_N=batch.behavior_logprobs_N,
            advantages_N=batch.advantages_N,
            rollouts_N=batch.rollouts_N,
            lengths=batch.lengths,
        )
        result = self._objective.losses(tokens)
        correction = correct(tokens, self._settings)
        losses_N = (correction.weights_N * result.losses_N).masked_fill(correction.masked_N, 0)
        base_kl_N = torch.zeros_like(losses_N)
        if reference_logprobs_N is not None:
            base_kl_N = k3(reference_logprobs_N - learner_logprobs_N, bound=MAX_KL_LOG_RATIO)
            losses_N = losses_N + self._settings.kl_coefficient * base_kl_N
        if self.needs_entropy_gradient and entropies_N is not None:
            losses_N = losses_N - self._entropy_coefficient * entropies_N
        # Use masked_fill: multiplying by 0 would turn inf into NaN.
        loss = (losses_N.masked_fill(correction.vetoed_R[tokens.rollouts_N], 0) * batch.weights_N).sum()
        with torch.no_grad():
            ratio_N = ratio(learner_logprobs_N, batch.behavior_logprobs_N)
            mismatch_kl_N = k3(learner_logprobs_N - batch.behavior_logprobs_N)
            masked_R = in_rollouts(correction.masked_N, tokens)
            columns = (
                torch.ones_like(ratio_N),
                ratio_N,
                result.clipped_N,
                mismatch_kl_N,
                correction.weights_N,
                correction.bounded_N,
                correction.vetoed_R | masked_R,
                base_kl_N,
                torch.zeros_like(ratio_N) if entropies_N is None else entropies_N,
            )
            largest = ratio_N.max() if len(ratio_N) else ratio_N.sum()
            return loss, torch.stack([loss.detach(), *(column.sum().float() for column in columns), largest])
