"""Evidence by hand, and of simulated engines: honest ones that round, and forgers.

An engine's logits are the policy's plus noise: Student's t with four degrees of freedom, as normal noise whose size
differs from position to position. The engine draws by the rule of `echo_shared.draws` from its own logits; its tokens
are then examined under the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import Alternative, against, judged
from echo_hub.core.trust.numerics import Honest
from echo_hub.core.trust.standing import Standing
from echo_shared import draws

VOCABULARY: Final = 64
HALF: Final = -np.log(2.0)


def evidence(right: int = 0, *, forged: int = 0, error: float = 0.0) -> Evidence:
    """Tokens of 50 %, whose intervals are [0, .5). `right`: with u = .25; `forged`: with u = .9999. Each claim's
    log-odds are the true ones less `error`."""
    count = right + forged
    claims = -np.logaddexp(0.0, np.full(count, error))  # Log-odds of -error.
    return Evidence.of([0.0] * count, [HALF] * count, [0.25] * right + [0.9999] * forged, claims)


def greedy(shortfalls: Sequence[float]) -> Evidence:
    """Greedy choices, so many nats below the most likely token."""
    count = len(shortfalls)
    zeros = np.zeros(count)
    (found,) = Evidence.of_spans(np.array(shortfalls), zeros, zeros, zeros, [count], greedy_N=np.ones(count, bool))
    return found


def logits(rng: np.random.Generator, count: int, noise: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The policy's, sharp and flat ones, and the engine's; both [N, V]."""
    true = rng.normal(size=(count, VOCABULARY)) * rng.uniform(0.5, 4.0, size=(count, 1))
    sizes = noise * np.sqrt(4.0 / rng.chisquare(4, size=(count, 1)))
    return true, true + sizes * rng.normal(size=(count, VOCABULARY))


Tokens = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Beginnings of intervals, true log-probabilities, uniforms and claims, each [N]."""


def tokens(rng: np.random.Generator, count: int, noise: float, *, forged: float = 0.0, shift: float = 0.0) -> Tokens:
    """`noise`: scale of the logits' noise, nats; `forged`: share of tokens that are drawn with another uniform;
    `shift`: nats added to each claim."""
    true, own = logits(rng, count, noise)
    uniforms = rng.random(count)
    used = np.where(rng.random(count) < forged, rng.random(count), uniforms)
    ids, claims = draws.draw(own, used, 1.0)
    below, logprobs = draws.interval(true, ids, 1.0)
    return below, logprobs, uniforms, claims + shift


def engine(seed: int, noise: float, count: int = 4_096, *, forged: float = 0.0, shift: float = 0.0) -> Evidence:
    """What so many tokens of one engine show together."""
    return Evidence.of(*tokens(np.random.default_rng(seed), count, noise, forged=forged, shift=shift))


def rollouts(
    seed: int, number: int, noise: float, *, length: int = 20, forged: float = 0.0, shift: float = 0.0
) -> list[Evidence]:
    """What each of an engine's rollouts shows."""
    found = tokens(np.random.default_rng(seed), number * length, noise, forged=forged, shift=shift)
    return Evidence.of_spans(*found, [length] * number)


def tokens_until(alarm: float, honest: Honest, shown: Sequence[Evidence]) -> tuple[int, Alternative] | None:
    """The tokens after which a node that shows these rollouts is convicted, and of what; None: it is not. As
    `core.trust.trust` judges a node."""
    standing, count = Standing("a"), 0
    for one in shown:
        count += one.num_tokens
        standing.sums = judged(standing.sums, one, standing.recent, honest, alarm)
        nats, alternative = against(standing.sums)
        if nats >= alarm:
            return count, alternative
        standing.show(one)
    return None
