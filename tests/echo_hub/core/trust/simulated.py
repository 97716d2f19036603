"""Evidence made by hand, and from simulated engines: honest ones that round, and forgers.

An engine's logits are the policy's plus noise. The noise is Student's t with four degrees of freedom, like normal noise
whose size differs between positions. The engine samples from its own logits by the rule of
`echo_shared.sampling.draws`. Its tokens are then examined under the policy's logits.
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
from echo_shared.sampling import draws

VOCABULARY: Final = 64
HALF: Final = -np.log(2.0)


def evidence(right: int = 0, *, forged: int = 0, error: float = 0.0) -> Evidence:
    """Return the evidence of tokens with probability 0.5, each drawn if the random number u is in [0, .5). `right`:
    number of tokens with u = .25, which is inside; `forged`: number of tokens with u = .9999, which is outside. Claimed
    log-odds are `error` below the true ones.
    """
    count = right + forged
    claims = -np.logaddexp(0.0, np.full(count, error))  # Claimed log-odds of -error, as a log-probability.
    return Evidence.of([0.0] * count, [HALF] * count, [0.25] * right + [0.9999] * forged, claims)


def greedy(shortfalls: Sequence[float]) -> Evidence:
    """Return the evidence of greedy choices, each this many nats less likely than the most likely token."""
    count = len(shortfalls)
    zeros = np.zeros(count)
    (found,) = Evidence.of_spans(np.array(shortfalls), zeros, zeros, zeros, [count], greedy_N=np.ones(count, bool))
    return found


def logits(rng: np.random.Generator, count: int, noise: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return logits [N, V] of the policy, for sharp and flat distributions, and the same logits as the engine computes
    them.
    """
    true = rng.normal(size=(count, VOCABULARY)) * rng.uniform(0.5, 4.0, size=(count, 1))
    sizes = noise * np.sqrt(4.0 / rng.chisquare(4, size=(count, 1)))
    return true, true + sizes * rng.normal(size=(count, VOCABULARY))


Tokens = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""For each of N tokens: lower end of the interval of cumulative probability that draws it, true log-probability,
uniform u, and claimed log-probability.
"""


def tokens(rng: np.random.Generator, count: int, noise: float, *, forged: float = 0.0, shift: float = 0.0) -> Tokens:
    """Return the tokens that an engine with noise of this scale, in nats, samples. `forged`: share of tokens selected
    by another uniform than the prescribed one. `shift`: nats added to each claimed log-probability.
    """
    true, own = logits(rng, count, noise)
    uniforms = rng.random(count)
    used = np.where(rng.random(count) < forged, rng.random(count), uniforms)
    ids, claims = draws.draw(own, used, 1.0)
    below, logprobs = draws.interval(true, ids, 1.0)
    return below, logprobs, uniforms, claims + shift


def engine(seed: int, noise: float, count: int = 4_096, *, forged: float = 0.0, shift: float = 0.0) -> Evidence:
    """Return the evidence of `count` tokens of one engine, added up."""
    return Evidence.of(*tokens(np.random.default_rng(seed), count, noise, forged=forged, shift=shift))


def rollouts(
    seed: int, number: int, noise: float, *, length: int = 20, forged: float = 0.0, shift: float = 0.0
) -> list[Evidence]:
    """Return the evidence of each of `number` rollouts of one engine."""
    found = tokens(np.random.default_rng(seed), number * length, noise, forged=forged, shift=shift)
    return Evidence.of_spans(*found, [length] * number)


def tokens_until(alarm: float, honest: Honest, shown: Sequence[Evidence]) -> tuple[int, Alternative] | None:
    """Judge a node by this evidence as `core.trust.trust` does. Return (tokens until conviction, alternative), or
    None.
    """
    standing, count = Standing("a"), 0
    for one in shown:
        count += one.num_tokens
        standing.sums = judged(standing.sums, one, standing.recent, honest, alarm)
        nats, alternative = against(standing.sums)
        if nats >= alarm:
            return count, alternative
        standing.show(one)
    return None
