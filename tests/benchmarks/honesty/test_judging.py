from __future__ import annotations

import numpy as np

from benchmarks.honesty.judging import judged_in_order, known_by, orders
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NumericsClass

EXACT = NumericsClass("torch", "f32", "cpu")


def evidence(rng: np.random.Generator, tokens: int, *, forged: bool) -> Evidence:
    """Return the verifier's evidence about random tokens from a vocabulary of two, with probabilities 0.6 and 0.4.
    Honest tokens follow from the uniforms (the random numbers of the draws); forged ones do not.
    """
    uniforms = rng.random(tokens)
    is_first = rng.random(tokens) < 0.6 if forged else uniforms < 0.6
    below, logprobs = np.where(is_first, 0.0, 0.6), np.log(np.where(is_first, 0.6, 0.4))
    return Evidence.of(below, logprobs, uniforms, logprobs)


def test_forged_rollouts_convict_and_honest_ones_do_not() -> None:
    rng = np.random.default_rng(1)
    known = known_by(EXACT, evidence(rng, 2_000, forged=False), temperature=1.0)
    honest = list(judged_in_order((evidence(rng, 10, forged=False) for _ in range(300)), known))
    assert len(honest) == 300 and not any(failed for _, failed in honest)
    forged = list(judged_in_order((evidence(rng, 10, forged=True) for _ in range(30)), known))
    assert forged[-1][1], "a node whose tokens do not follow from the uniforms is convicted"


def test_an_order_keeps_groups_together_and_depends_on_the_seed() -> None:
    rng = np.random.default_rng(2)
    shown = [(group, evidence(rng, 3, forged=False)) for group in range(6) for _ in range(2)]
    of_group = {id(one): group for group, one in shown}
    for order in orders(shown, 3, seed=5):
        groups = [of_group[id(one)] for one in order]
        assert groups[::2] == groups[1::2] and sorted(groups) == sorted(group for group, _ in shown)
    first, again = ([list(map(id, order)) for order in orders(shown, 2, seed=5)] for _ in range(2))
    assert first == again and first[0] != first[1]
