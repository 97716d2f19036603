from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, NO_EVIDENCE, Evidence
from echo_hub.core.trust.numerics import (
    DRIFT,
    LEAST,
    LEAST_VARIANCE,
    MOST_CLASSES,
    OTHERS,
    PRIOR_TOKENS,
    PRIORS,
    VARIANCE_TOKENS,
    Numerics,
    NumericsClass,
    prior,
)

TORCH = NumericsClass("torch", "bf16", "cuda")


def shown(*draws: int) -> Evidence:
    return Evidence(draws=draws, claims=(sum(draws), 0, 0, 0, 0, 0))


EVERY_PRIOR = tuple(dict.fromkeys((*PRIORS.values(), prior(NumericsClass()))))


@pytest.mark.parametrize("honest", EVERY_PRIOR, ids=lambda honest: str(honest.draws))
def test_a_prior_has_a_share_for_every_class_of_evidence(honest) -> None:
    assert (len(honest.draws), len(honest.claims)) == (len(DRAW_EDGES) + 1, len(CLAIM_EDGES) + 1)
    assert sum(honest.draws) == pytest.approx(1.0) and sum(honest.claims) == pytest.approx(1.0)
    assert min(honest.draws + honest.claims) >= LEAST


def test_nothing_is_wider_than_what_a_liar_may_claim() -> None:
    """In what lies far outside: a precision that is not known is the coarsest."""
    widest = prior(NumericsClass("made-up", "q1_xxl", "abacus"))
    for honest in PRIORS.values():
        assert sum(honest.draws[3:]) <= sum(widest.draws[3:]) and sum(honest.claims[4:]) <= sum(widest.claims[4:])


def test_a_class_begins_with_its_prior() -> None:
    assert Numerics().honest(TORCH).draws == pytest.approx(PRIORS["bf16"].draws)


def test_what_is_learned_weighs_as_many_tokens_as_it_has() -> None:
    numerics = Numerics()
    cls = numerics.known(TORCH)
    numerics.learn(cls, shown(3_960, 20, 20, 0, 0, 0))
    before, now = PRIORS["bf16"].draws, numerics.honest(cls).draws
    assert now[1] == pytest.approx((PRIOR_TOKENS * before[1] + 20) / (PRIOR_TOKENS + 4_000))
    assert now[3] == pytest.approx(before[3] / 2)
    assert sum(now) == pytest.approx(1.0)
    numerics.unlearn(cls, shown(3_960, 20, 20, 0, 0, 0))
    assert numerics.honest(cls).draws == pytest.approx(before)


def test_nobody_teaches_a_class_to_take_forgeries_for_honest() -> None:
    numerics = Numerics()
    cls = numerics.known(TORCH)
    numerics.learn(cls, shown(0, 0, 0, 0, 0, 10**6))
    assert numerics.honest(cls).draws[5] == pytest.approx(DRIFT * PRIORS["bf16"].draws[5])


def test_nobody_is_measured_by_himself() -> None:
    numerics = Numerics()
    cls = numerics.known(TORCH)
    mine, theirs = shown(900, 0, 0, 50, 50, 0), shown(1_000, 0, 0, 0, 0, 0)
    numerics.learn(cls, mine)
    assert numerics.honest(cls, without=mine).draws == pytest.approx(PRIORS["bf16"].draws)
    numerics.learn(cls, theirs)
    alone = Numerics()
    alone.learn(alone.known(TORCH), theirs)
    assert numerics.honest(cls, without=mine) == alone.honest(cls)


def test_exact_engines_do_not_teach_a_class_that_nobody_rounds() -> None:
    """By hand, four bits: a draw that lies 0.5 to 1 nat outside counts as 0.0005 / 4, of a million exact ones."""
    numerics = Numerics()
    cls = numerics.known(NumericsClass("llama_cpp", "q4_k_m", "cpu"))
    numerics.learn(cls, shown(10**6, 0, 0, 0, 0, 0))
    learned, before = numerics.honest(cls), PRIORS["q4_k_m"]
    assert learned.draws[4] == pytest.approx(1.25e-4)
    assert learned.draws[1:] == pytest.approx([share / DRIFT for share in before.draws[1:]])
    assert learned.claims[1:] == pytest.approx([share / DRIFT for share in before.claims[1:]])
    assert sum(learned.draws) == pytest.approx(1.0) and sum(learned.claims) == pytest.approx(1.0)


def scattered(error: float, tokens: int) -> Evidence:
    """To both sides alike."""
    return Evidence.of([0.0] * tokens, [error, -error] * (tokens // 2))


def test_a_class_begins_with_the_most_that_its_claims_may_scatter() -> None:
    """By hand: .26 * .01**2 + .3 * .05**2 + .392 * .2**2 + .048 * .5**2 = .02846."""
    before = 0.26e-4 + 0.3 * 25e-4 + 0.392 * 0.04 + 0.048 * 0.25
    assert prior(TORCH).variance == Numerics().honest(TORCH).variance == pytest.approx(before)


def test_how_much_claims_scatter_is_learned_from_others() -> None:
    """By hand: 3,000 tokens that err by 0.13: (1,000 * .02846 + 3,000 * .0169) / 4,000 = .01979."""
    numerics = Numerics()
    cls = numerics.known(TORCH)
    evidence = scattered(0.13, 3_000)
    numerics.learn(cls, evidence)
    before = prior(TORCH).variance
    learned = (VARIANCE_TOKENS * before + 3_000 * 0.13**2) / (VARIANCE_TOKENS + 3_000)
    assert numerics.honest(cls).variance == pytest.approx(learned) == pytest.approx(0.01979, rel=1e-3)
    assert numerics.honest(cls, without=evidence).variance == pytest.approx(before)
    numerics.unlearn(cls, evidence)
    assert numerics.honest(cls).variance == pytest.approx(before)


@pytest.mark.parametrize("error", [0.0, 1e-4, 0.25, 0.5, 5.0])
def test_nobody_teaches_a_class_another_scatter_than_honest_engines_have(error: float) -> None:
    """Exact engines that claim a coarse class do not make its honest nodes stand out; no noise hides a forgery."""
    numerics = Numerics()
    cls = numerics.known(NumericsClass("llama_cpp", "q4_k_m", "cpu"))
    before = numerics.honest(cls).variance
    numerics.learn(cls, scattered(error, 10**5))
    learned = numerics.honest(cls)
    most = (0.01, 0.05, 0.2, 0.5, 0.5, 0.5)
    allowed = sum(share * size**2 for share, size in zip(learned.claims, most, strict=True))
    assert learned.variance == pytest.approx(max(LEAST_VARIANCE * before, min(allowed, min(error, 0.5) ** 2)), rel=0.1)


def test_a_coarse_class_keeps_shares_that_add_up() -> None:
    numerics = Numerics()
    cls = numerics.known(NumericsClass())
    numerics.learn(cls, Evidence(draws=(0,) * 6, claims=(0, 10**5, 10**5, 10**5, 10**5, 10**5)))
    assert sum(numerics.honest(cls).claims) == pytest.approx(1.0)
    assert min(numerics.honest(cls).claims) > 0


def test_made_up_names_take_a_bounded_place() -> None:
    numerics = Numerics()
    known = {numerics.known(NumericsClass(f"engine {number}")) for number in range(MOST_CLASSES + 50)}
    assert len(known) == MOST_CLASSES + 1 and OTHERS in known
    assert numerics.known(NumericsClass("engine 3")) == NumericsClass("engine 3")
    assert numerics.honest(OTHERS).draws == pytest.approx(prior(NumericsClass()).draws)
    assert numerics.honest(NumericsClass("never seen", "f32")).draws == pytest.approx(PRIORS["f32"].draws)
    assert NO_EVIDENCE.num_tokens == 0


def test_a_class_has_a_name() -> None:
    assert str(TORCH) == "torch/bf16/cuda" and str(NumericsClass("mlx")) == "mlx/?/?"
