from __future__ import annotations

from dataclasses import replace
from math import e, exp, log

import pytest

from echo_hub.core.trust.evidence import CLAIM_CUT, Evidence
from echo_hub.core.trust.judging import (
    DISHONEST_CLAIMS,
    DISHONEST_DRAWS,
    NOTHING,
    WEIGHTS,
    added,
    alarm,
    log_ratios,
    proof_added,
    weigh,
)
from echo_hub.core.trust.numerics import COARSEST, PRIORS, Numerics, NumericsClass, prior
from echo_hub.core.trust.pairs import together

F32 = PRIORS["f32"]
COARSE = prior(NumericsClass())


def drawn(*draws: int) -> Evidence:
    return Evidence(draws=draws, claims=(sum(draws), 0, 0, 0, 0, 0))


def test_a_token_weighs_the_ratio_of_the_two_hypotheses() -> None:
    """By hand: w = 0.2, q0 = 5e-5, f = 0.58: ln(0.8 + 0.2 * 0.58 / 5e-5) = ln(2320.8) = 7.7496."""
    ratios = log_ratios(F32.draws, DISHONEST_DRAWS, 0.2)
    assert ratios[0] == pytest.approx(-0.22314, abs=1e-5)
    assert ratios[5] == pytest.approx(7.7497, abs=1e-4)


def test_what_a_whole_group_shows_alike_convicts_nobody() -> None:
    """Of each of a group of eight rollouts of five tokens the same one is off by more than a nat."""
    one = Evidence(draws=(5, 0, 0, 0, 0, 0), claims=(2, 1, 1, 0, 0, 1))
    for name in ("q8_0", "q4_k_m"):
        sums = NOTHING
        for _ in range(8):
            sums = added(sums, weigh(one, PRIORS[name]))
        assert 0.0 < max(sums) < alarm(1e-6)


def test_a_rollout_weighs_the_sum_of_its_tokens_for_each_sum() -> None:
    weighed = weigh(drawn(3, 0, 0, 0, 0, 1), F32)
    assert weighed[0] == pytest.approx(3 * log(0.8) + log(0.8 + 0.2 * 0.58 / 5e-5))
    assert weighed[2] == pytest.approx(3 * log(0.998) + log(0.998 + 0.002 * 0.58 / 5e-5))
    assert weighed[3] == pytest.approx(4 * log(0.8))
    assert len(weighed) == len(NOTHING) == 2 * len(WEIGHTS) + 3


def test_what_varies_more_than_its_tokens_weighs_less() -> None:
    weighed = weigh(drawn(0, 0, 0, 0, 0, 2), COARSE)
    assert weighed[0] == pytest.approx(2 * log(0.8 + 0.2 * 0.58 / 0.0006) / 1.5)


@pytest.mark.parametrize("honest", [*PRIORS.values(), COARSE], ids=lambda honest: f"{honest.draws[0]}")
@pytest.mark.parametrize("w", WEIGHTS)
def test_under_honesty_what_a_token_weighs_has_mean_one(honest, w: float) -> None:
    """e**weight, which is what bounds false alarms; less where it is tempered."""
    for shares, dishonest in ((honest.draws, DISHONEST_DRAWS), (honest.claims, DISHONEST_CLAIMS)):
        ratios = log_ratios(shares, dishonest, w)
        dispersion = honest.dispersion if shares is honest.draws else honest.claims_dispersion
        mean = sum(q * exp(ratio / dispersion) for q, ratio in zip(shares, ratios, strict=True))
        assert mean == pytest.approx(1.0) if dispersion == 1.0 else mean < 1.0


@pytest.mark.parametrize("honest", PRIORS.values(), ids=lambda honest: f"{honest.claims[0]}")
def test_nor_is_a_class_convicted_of_being_coarse(honest) -> None:
    ratios = log_ratios(honest.claims, COARSEST.claims, 1.0)
    assert sum(q * exp(ratio) for q, ratio in zip(honest.claims, ratios, strict=True)) == pytest.approx(1.0)
    assert sum(q * ratio for q, ratio in zip(honest.claims, ratios, strict=True)) < 0.0


def by_shares(shares, tokens: int) -> Evidence:
    """So many tokens whose claims fall as in this class, and whose draws are all right."""
    claims = [round(share * tokens) for share in shares]
    return Evidence(draws=(sum(claims), 0, 0, 0, 0, 0), claims=tuple(claims))


def test_fewer_bits_than_a_node_says_convict_it() -> None:
    """By hand, a token of q8_0 as float32: .26 ln(.16/.975) + .3 ln(.115/.02) + .392 ln(.245/.0036) + .043 ln(.31/.001)
    + .004 ln(.13/.0003) + .001 ln(.04/.0001) = 1.986."""
    assert weigh(by_shares(PRIORS["q8_0"].claims, 10_000), F32)[6] / 10_000 == pytest.approx(1.986, abs=1e-3)
    for claimed in ("q8_0", "q4_k_m", "bf16"):
        assert max(weigh(by_shares(PRIORS[claimed].claims, 20), F32)) > alarm(1e-6)


def test_a_cache_of_half_precision_does_not_convict_who_says_float32() -> None:
    """Nor where all others have shown no error at all."""
    numerics, f32 = Numerics(), NumericsClass("llama_cpp", "f32", "cpu")
    numerics.known(f32)
    numerics.learn(f32, drawn(10**6, 0, 0, 0, 0, 0))
    for honest in (F32, numerics.honest(f32)):
        assert weigh(by_shares(PRIORS["f16"].claims, 10_000), honest)[6] < 0.0


def test_where_nothing_is_coarser_there_is_nothing_to_look_for() -> None:
    numerics, q8 = Numerics(), NumericsClass("llama_cpp", "q8_0", "cpu")
    numerics.known(q8)
    numerics.learn(q8, drawn(10**6, 0, 0, 0, 0, 0))  # Exact engines say that they are coarse.
    for honest in (COARSE, together(F32, COARSE), together(PRIORS["q4_k_m"], PRIORS["q4_k_m"]), numerics.honest(q8)):
        assert weigh(by_shares(COARSE.claims, 100), honest)[6] == 0.0


def test_sums_never_fall_below_nothing() -> None:
    assert added((0.0, 1.0, 5.0), (2.0, -3.0, -1.0)) == (2.0, 0.0, 4.0)


def test_the_alarm_bounds_all_sums_together() -> None:
    """ln(9 / 1e-6) = 16.0127."""
    assert alarm(1e-6) == pytest.approx(16.0127, abs=1e-4)


def test_a_bias_of_claims_weighs_what_is_beyond_chance() -> None:
    """By hand, 8 bits: v = .26 * .01**2 + .3 * .05**2 + .392 * .2**2 + .048 * .5**2 = .02846; psi = .1387."""
    honest = PRIORS["q8_0"]
    variance = 0.26e-4 + 0.3 * 25e-4 + 0.392 * 0.04 + 0.048 * 0.25
    psi = (e - 2) * variance * 4 + variance * 2
    too_high = Evidence.of([0.0] * 10, [-0.25] * 10)
    weighed = weigh(too_high, honest)
    assert weighed[-2:] == pytest.approx(((-5.0 - 10 * psi) / 4, (5.0 - 10 * psi) / 4), rel=1e-3)


@pytest.mark.parametrize("error", [CLAIM_CUT, 0.25, 0.05])
@pytest.mark.parametrize("honest", [*PRIORS.values(), COARSE], ids=lambda honest: f"{honest.draws[0]}")
def test_errors_to_both_sides_convict_nobody_on_average(honest, error: float) -> None:
    """e**weight of errors as large as the class has them, and of the mean that true claims of its divergence have."""
    bounds = (0.01, 0.05, 0.2, CLAIM_CUT, CLAIM_CUT, CLAIM_CUT)
    variance = sum(share * min(bound, error) ** 2 for share, bound in zip(honest.claims, bounds, strict=True))
    up = 0.5 - variance / 2 / (2 * error) / sum(honest.claims)
    for sign in (-2, -1):
        mean = 0.0
        for share, bound in zip(honest.claims, bounds, strict=True):
            size = min(bound, error)
            for chance, difference in ((up, size), (1 - up, -size)):
                mean += share * chance * exp(weigh(Evidence.of([0.0], [difference]), honest)[sign])
        assert mean <= 1.0 + 1e-9


@pytest.mark.parametrize("error", [CLAIM_CUT, 0.25, 0.05])
@pytest.mark.parametrize("honest", [*PRIORS.values(), COARSE], ids=lambda honest: f"{honest.draws[0]}")
@pytest.mark.parametrize("learned", [0.5, 0.75])
def test_errors_as_large_as_the_class_has_shown_convict_nobody_on_average(honest, error: float, learned: float) -> None:
    """A share of the tokens errs by as much as the learned mean square has room for, and the others not at all; the
    mean of the errors is the one of true claims, to the worse side."""
    honest = replace(honest, learned_variance=learned * honest.variance)
    share = min(1.0, honest.variance / error**2)
    mean = share * error**2 / 2
    up = 0.5 + mean / (2 * error * share)
    for sign, chance in ((-2, up), (-1, 1 - up)):
        likely = ((share * chance, error), (share * (1 - chance), -error), (1 - share, 0.0))
        weights = ((one, weigh(Evidence.of([0.0], [difference]), honest)[sign]) for one, difference in likely)
        assert sum(one * exp(weight) for one, weight in weights) <= 1.0 + 1e-9


def test_a_class_that_knows_its_scatter_convicts_sooner() -> None:
    """By hand, four bits: v = .07203, psi = (e - 2) * .28814 + .14407 = .3510; of half of that, .1755. A token whose
    claim is 0.25 too high weighs (.5 - .3510) / 4 = .0372, or (.5 - .1755) / 4 = .0811."""
    coarse = PRIORS["q4_k_m"]
    known = replace(coarse, learned_variance=coarse.variance / 2)
    too_high = Evidence.of([0.0], [-0.25])
    assert weigh(too_high, coarse)[-1] == pytest.approx(0.0372, abs=1e-4)
    assert weigh(too_high, known)[-1] == pytest.approx(0.0811, abs=1e-4)
    assert weigh(too_high, known)[:-2] == weigh(too_high, coarse)[:-2]


def test_three_forged_tokens_convict_and_two_do_not() -> None:
    assert max(weigh(drawn(0, 0, 0, 0, 0, 3), F32)) > alarm(1e-6)
    assert max(weigh(drawn(0, 0, 0, 0, 0, 2), F32)) < alarm(1e-6)


def test_a_forged_end_behind_a_long_honest_beginning_convicts() -> None:
    """4,000 tokens that were drawn honestly speak for the node only in the sums that look for many forged ones."""
    weighed = weigh(drawn(4_000, 0, 0, 0, 0, 12), F32)
    assert weighed[0] < 0 and max(weighed) > alarm(1e-6)


@pytest.mark.parametrize(
    ("claimed", "honest", "tokens"), [(4, F32, 4), (5, F32, 3), (4, PRIORS["bf16"], 29), (5, COARSE, 44)]
)
def test_invented_log_probabilities_convict(claimed: int, honest, tokens: int) -> None:
    claims = tuple(tokens if place == claimed else 0 for place in range(6))
    assert max(weigh(Evidence(draws=(tokens, 0, 0, 0, 0, 0), claims=claims), honest)) > alarm(1e-6)


def test_draws_alone_speak_for_a_node_and_only_up_to_now() -> None:
    weighed = weigh(drawn(10, 0, 0, 0, 0, 0), F32)
    assert proof_added(-3.0, weighed) == pytest.approx(-3.0 + 10 * log(0.8 + 0.2 * 0.0 / 0.9985))
    assert proof_added(-3.0, weigh(drawn(0, 0, 0, 0, 0, 1), F32)) == 0.0


def test_the_smallest_miss_takes_thirty_one_honest_tokens() -> None:
    """ln(1e-3) / ln(0.8) = 30.96."""
    assert proof_added(0.0, weigh(drawn(30, 0, 0, 0, 0, 0), F32)) > log(1e-3)
    assert proof_added(0.0, weigh(drawn(31, 0, 0, 0, 0, 0), F32)) < log(1e-3)
