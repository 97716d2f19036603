"""The losses of `forward_backward`: each is a plain sum over all positions of all data.

    p = log π(target) of the model that is trained, q = `logprobs` (given), r = exp(p - q), A = `advantages`,
    w = `weights` (1 if not given), sg = no gradient

    cross_entropy          -Σ w p                                        over all targets of a position
    importance_sampling    -Σ w r A
    ppo                    -Σ w min(r A, clip(r, low, high) A)
    cispo                  -Σ w sg(clip(r, low, high)) p A
    dro                    -Σ w (p A - ½ beta (p - q)²)
    gspo                   -Σ w min(s_t A, clip(s_t, low, high) A)       s_t = sg(s) π / sg(π)
                           s = exp(mean of p - q over `sequence_ratio_mask` of the datum)

s_t has the value s, and the gradient of π at its own token. There is no mean and no normalisation: a caller that wants
a mean scales advantages or weights. `low` and `high` bound the ratio itself, and may be given for each token.
cross_entropy has its gradient in `weighted`, the others in `terms`.

Sources: PPO (arXiv 1707.06347, eq. 7), CISPO (arXiv 2506.13585, eq. 4), DRO (arXiv 2405.19107, eq. 4), GSPO-token
(arXiv 2507.18071, section 4.3).

Dimensions: N positions of a micro-batch, M trained positions. The terms of other positions are 0 for any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner.models.inputs import (
    ADVANTAGES,
    LOGPROBS,
    RATIO_MASK,
    WEIGHTS,
)
from echo_hub.tenants.requests import Datum, LossFunction

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Inputs of a loss over sampled tokens, all [M]."""

    p: Tensor
    """Log-probabilities of the target tokens under the model that is trained, with their autograd graph."""
    q: Tensor
    advantages: Tensor
    weights: Tensor
    low: Tensor
    high: Tensor
    ratios: Tensor
    """For the loss gspo: the ratio s of each token's datum. Other losses do not use it."""
    beta: float


def trained_positions(datum: Datum, loss: LossFunction) -> NDArray[np.bool_]:
    """Return True [N] for each position with a term in the loss. A term of other positions is exactly 0."""
    inputs = datum.loss_inputs
    found = np.ones(len(datum.input_ids), dtype=bool)
    if WEIGHTS in inputs:
        found &= (inputs[WEIGHTS] != 0).reshape(len(found), -1).any(axis=1)
    if ADVANTAGES in inputs and loss is not LossFunction.DRO:
        found &= inputs[ADVANTAGES] != 0
    return found


def sequence_ratio(logprobs_N: Values, datum: Datum) -> float:
    """Return s, gspo's ratio of a datum: the geometric mean of r over the tokens in the mask."""
    mask = datum.loss_inputs[RATIO_MASK].astype(np.float64)
    if not mask.any():
        return 1.0
    chosen = mask != 0
    apart = logprobs_N[chosen].astype(np.float64) - datum.loss_inputs[LOGPROBS][chosen]
    with np.errstate(over="ignore"):
        return float(np.exp((mask[chosen] * apart).sum() / mask.sum()))


def inputs_of(datum: Datum, name: str, options: Mapping[str, float]) -> NDArray[Any]:
    """Return an input [N] of the datum. Missing weights are 1. Another missing input has the value of the option with
    its name.
    """
    if name in datum.loss_inputs:
        return datum.loss_inputs[name].astype(np.float32)
    value = options.get(name, 1.0 if name == WEIGHTS else 0.0)
    return np.full(len(datum.input_ids), value, dtype=np.float32)


def terms(loss: LossFunction, tokens: SampledTokens) -> Tensor:
    """Return each token's term of the loss [M], with its graph. The loss is their sum."""
    return -tokens.weights * _TERMS[loss](tokens)


def _importance_sampling(tokens: SampledTokens) -> Tensor:
    return torch.exp(tokens.p - tokens.q) * tokens.advantages


def _clipped(ratios: Tensor, tokens: SampledTokens) -> Tensor:
    clipped = torch.clamp(ratios, tokens.low, tokens.high)
    return torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)


def _ppo(tokens: SampledTokens) -> Tensor:
    return _clipped(torch.exp(tokens.p - tokens.q), tokens)


def _cispo(tokens: SampledTokens) -> Tensor:
    ratios = torch.exp(tokens.p.detach() - tokens.q)
    return torch.clamp(ratios, tokens.low, tokens.high) * tokens.p * tokens.advantages


def _dro(tokens: SampledTokens) -> Tensor:
    return tokens.p * tokens.advantages - 0.5 * tokens.beta * (tokens.p - tokens.q).square()


def _gspo(tokens: SampledTokens) -> Tensor:
    return _clipped(tokens.ratios * torch.exp(tokens.p - tokens.p.detach()), tokens)


_TERMS: Final[Mapping[LossFunction, Callable[[SampledTokens], Tensor]]] = {
    LossFunction.IMPORTANCE_SAMPLING: _importance_sampling,
    LossFunction.PPO: _ppo,
    LossFunction.CISPO: _cispo,
    LossFunction.DRO: _dro,
    LossFunction.GSPO: _gspo,
}
