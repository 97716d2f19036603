"""The sequential test for dishonest tokens of a node: computed by hand, and on simulated engines that are honest,
coarse or forging.
"""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import (
    CLAIMS_DISPERSION,
    COARSER,
    DRAWS_DISPERSION,
    NOTHING,
    Alternative,
    added,
    against,
    alarm,
    is_explained,
    judged,
    proof_added,
    weigh,
)
from echo_hub.core.trust.likelihood import NUM_SCALES, OUTLIERS, SCALES, WEIGHTS
from echo_hub.core.trust.numerics import Honest, Numerics, NumericsClass, default
from tests.echo_hub.core.trust.simulated import engine, evidence, greedy, logits, rollouts, tokens_until

F32 = Honest(draws=1, claims=1, tolerance=2)
COARSE = Honest(draws=14, claims=15, tolerance=2)
ALARM = alarm(1e-6)
NOISES = (0.003, 0.02, 0.1)
"""Scales of logit noise in nats, close to those of f16, bf16 and q8_0."""


def measured(noise: float) -> Honest:
    """Return the rounding scales that the hub measures for engines with this noise."""
    numerics = Numerics()
    numerics.measured("q8_0", engine(7, noise))
    return numerics.honest(NumericsClass("x", "q8_0", "cpu"))


# --- computed by hand


def test_the_alarm_bounds_all_alternatives_together() -> None:
    """Twelve alternatives (ways to be dishonest) share a false-alarm rate of 1e-6, so the alarm is at ln(12 / 1e-6) =
    16.3004 nats.
    """
    assert len(NOTHING) == 12
    assert alarm(1e-6) == pytest.approx(16.3004, abs=1e-4)


def test_an_honest_token_lowers_its_nodes_sums() -> None:
    """An honest token of 50 % is given, with u, the random number of its draw, inside the interval that draws the token
    and far from its edges. The density of u under honesty is f = 2 (1 - 1e-4) + 1e-4. For the alternative "a share w =
    .2 is forged", the token weighs ln(.8 + .2 / f) / 1.5 = -.07024 nats.
    """
    expected = [log(1 - w + w / (2 - OUTLIERS)) / DRAWS_DISPERSION for w in WEIGHTS]
    assert weigh(evidence(1), F32)[:3] == pytest.approx(expected, rel=1e-6)
    assert expected[0] == pytest.approx(-0.07024, abs=1e-5)


def test_forged_tokens_add_up_for_each_share() -> None:
    """Three forged and thirty honest tokens weigh (3 * 7.6014 - 30 * .10536) / 1.5 nats for the alternative "a share w
    = .2 is forged"; likewise for w = .02 and .002.
    """
    expected = [3 * log(1 - w + w / OUTLIERS) + 30 * log(1 - w + w / 2) for w in WEIGHTS]
    assert weigh(evidence(30, forged=3), F32)[:3] == pytest.approx(
        [one / DRAWS_DISPERSION for one in expected], abs=1e-2
    )


def test_four_forged_tokens_convict_and_three_do_not() -> None:
    """Forged tokens weigh 7.6014 / 1.5 nats each: four reach 20.3 nats, three 15.2; the alarm is at 16.3."""
    assert tokens_until(ALARM, F32, [evidence(forged=4)]) == (4, Alternative.DRAWS_FORGED)
    assert tokens_until(ALARM, F32, [evidence(forged=3)]) is None


def test_a_forged_end_after_an_honest_beginning_convicts() -> None:
    """After 4,000 honest tokens, the sum for "a share of .2 is forged" is far below the alarm, so the sums for smaller
    shares must find the forger.
    """
    weighed = weigh(evidence(4_000, forged=20), F32)
    assert weighed[0] < 0.0 and max(weighed) > ALARM


def test_claims_weigh_a_quarter() -> None:
    """Claimed log-probabilities 2 nats off, at rounding scale 1, have density t(2) = .06804 if honest, and t(1) / 2 =
    .19245 / 2 if invented (t: Student's, two degrees of freedom). Their weight is divided by 4, because rollouts of a
    group repeat errors.
    """
    honest = Honest(draws=16, claims=16)
    invented = 0.1924501 / 2.0
    likely = (1 - OUTLIERS) * 0.0680414 + OUTLIERS * invented
    expected = [log(1 - w + w * invented / likely) / 4.0 for w in WEIGHTS]
    assert weigh(evidence(1, error=2.0), honest)[3:6] == pytest.approx(expected, rel=1e-5)
    assert CLAIMS_DISPERSION == 4.0


def test_claims_that_are_shifted_weigh_for_their_side() -> None:
    honest = Honest(draws=8, claims=8)
    too_low, too_high = weigh(evidence(10, error=0.3), honest)[6:8], weigh(evidence(10, error=-0.3), honest)[6:8]
    assert too_low[0] > 0.0 > too_low[1] and too_high[1] > 0.0 > too_high[0]


def test_a_claim_error_of_a_coarser_scale_weighs_for_coarseness() -> None:
    """Claim errors of eight times the rounding scale of the node's class have density t(8) at that scale, but t(1) / 8
    at the eight times coarser scale. The weight is ln(1.5**-1.5 / 8) - ln(33**-1.5) = 2.557 nats, before the division
    by `CLAIMS_DISPERSION`.
    """
    honest = Honest(draws=8, claims=8)
    error = 8 * float(SCALES[8])
    coarse, own = log(1.5**-1.5 / 8), log(33.0**-1.5)
    assert weigh(evidence(1, error=error), honest)[8] == pytest.approx((coarse - own) / CLAIMS_DISPERSION, abs=1e-2)


def test_without_a_coarser_scale_coarseness_weighs_nothing() -> None:
    """Coarser rounding is tested at the scale `COARSER` steps above that of the node's class. Here this scale does not
    exist, so even errors of 30 nats give no evidence of coarser rounding.
    """
    honest = Honest(draws=14, claims=NUM_SCALES - COARSER)
    assert weigh(evidence(50, error=30.0), honest)[8] == 0.0


def test_sums_never_fall_below_nothing() -> None:
    sums = added(NOTHING, weigh(evidence(forged=3), F32))
    assert min(sums) >= 0.0 and max(sums) > 15.0
    assert added(sums, weigh(evidence(10_000), F32))[:3] == (0.0, 0.0, 0.0)
    assert added((1.0, *NOTHING[1:]), (-3.0,) * 12) == NOTHING


@pytest.mark.parametrize(
    ("row", "alternative"),
    [
        (0, Alternative.DRAWS_FORGED),
        (2, Alternative.DRAWS_FORGED),
        (3, Alternative.CLAIMS_INVENTED),
        (5, Alternative.CLAIMS_INVENTED),
        (6, Alternative.CLAIMS_TOO_LOW),
        (7, Alternative.CLAIMS_TOO_HIGH),
        (8, Alternative.COARSER_THAN_SAID),
        (9, Alternative.SHOPPED),
        (11, Alternative.SHOPPED),
    ],
)
def test_each_sum_has_its_alternative(row: int, alternative: Alternative) -> None:
    sums = [1.0] * 12
    sums[row] = 3.0
    assert against(tuple(sums)) == (3.0, alternative)


def test_sixty_six_sure_tokens_prove_a_node() -> None:
    """Nodes are proven at a sum of ln(1e-3). Each token of 50 % with u, the random number of its draw, inside the
    interval that draws the token weighs -.10536 nats, so 65.6 tokens are needed.
    """
    assert proof_added(0.0, evidence(65), F32) > log(1e-3) > proof_added(0.0, evidence(66), F32)
    assert proof_added(-3.0, evidence(10), F32) == pytest.approx(-3.0 - 10 * 0.10536, abs=1e-4)


def test_a_forged_token_takes_the_proof_away() -> None:
    assert proof_added(-3.0, evidence(forged=1), F32) == 0.0
    assert proof_added(-20.0, evidence(forged=1), F32) == pytest.approx(-20.0 + 7.6014, abs=1e-3)


def test_no_tokens_weigh_nothing() -> None:
    assert weigh(evidence(), F32) == (0.0,) * 12
    assert added(NOTHING, weigh(evidence(), F32)) == NOTHING and proof_added(-1.0, evidence(), F32) == -1.0
    assert is_explained(evidence(), F32, Alternative.DRAWS_FORGED, ALARM)


@pytest.mark.parametrize("forged", [20, 40, 400])
def test_forged_tokens_are_not_explained_by_rounding(forged: int) -> None:
    """Forged tokens could pass for coarse rounding, but the node's honest tokens show how finely it rounds; forged
    tokens alone fit no scale.
    """
    assert not is_explained(evidence(forged=forged), F32, Alternative.DRAWS_FORGED, ALARM)
    assert not is_explained(evidence(1_000, forged=forged), F32, Alternative.DRAWS_FORGED, ALARM)


@pytest.mark.parametrize(
    "alternative", [Alternative.CLAIMS_TOO_LOW, Alternative.COARSER_THAN_SAID, Alternative.SHOPPED]
)
def test_rounding_explains_neither_low_claims_nor_far_fewer_bits(alternative: Alternative) -> None:
    assert not is_explained(engine(3, 0.1, 1_000), measured(0.1), alternative, ALARM)


def test_rounding_explains_claims_too_high_by_its_variance() -> None:
    """Rounding noise of .8 nats makes claimed log-probabilities .32 nats too high on average (half its variance). A
    class of scale .4 may be twice as coarse, which explains that. No tolerated rounding explains .32 nats in a class of
    scale .1, or .8 nats in a class of scale .4.
    """
    assert is_explained(engine(3, 0.8, 2_000), measured(0.4), Alternative.CLAIMS_TOO_HIGH, ALARM)
    assert not is_explained(engine(3, 0.1, 2_000, shift=0.32), measured(0.1), Alternative.CLAIMS_TOO_HIGH, ALARM)
    assert not is_explained(engine(3, 0.4, 2_000, shift=0.8), measured(0.4), Alternative.CLAIMS_TOO_HIGH, ALARM)


def test_an_explained_sum_is_reset_and_the_others_stay() -> None:
    """Rounding twice as coarse as the class's brings one sum to the alarm. As rounding explains this sum, the sum
    starts at 0 again; the other sums continue.
    """
    honest, recent = measured(0.02), engine(3, 0.04)
    before = tuple(ALARM - 1e-6 if place == Alternative.CLAIMS_INVENTED else ALARM / 2 for place in range(len(NOTHING)))
    one = evidence(1, error=0.3)
    expected = list(added(before, weigh(one, honest)))
    assert expected[Alternative.CLAIMS_INVENTED] > ALARM > max(expected[Alternative.CLAIMS_TOO_LOW :])
    expected[Alternative.CLAIMS_INVENTED] = 0.0
    assert judged(before, one, recent, honest, ALARM) == tuple(expected)


@pytest.mark.parametrize("alternative", [Alternative.DRAWS_FORGED, Alternative.CLAIMS_INVENTED])
def test_rounding_within_the_tolerance_is_explained(alternative: Alternative) -> None:
    honest = measured(0.02)
    assert is_explained(engine(3, 0.04), honest, alternative, ALARM)
    assert not is_explained(engine(3, 0.32), honest, alternative, ALARM)


# --- simulated engines


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
@pytest.mark.parametrize("times", [0.7, 1.0])
def test_400_honest_nodes_are_never_convicted(noise: float, times: float) -> None:
    """Nodes round as coarsely as their class, or less. Each shows 300 rollouts of 20 tokens, drawn from 1,000 simulated
    ones.
    """
    honest = measured(noise)
    weighed_RA = np.array([weigh(one, honest) for one in rollouts(int(1_000 * noise * times), 1_000, noise * times)])
    rng = np.random.default_rng(0)
    sums_NA, highest = np.zeros((400, len(NOTHING))), 0.0
    for _ in range(300):
        sums_NA = np.maximum(sums_NA + weighed_RA[rng.integers(0, 1_000, 400)], 0.0)
        highest = max(highest, sums_NA.max())
    assert highest < ALARM


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
def test_nodes_twice_as_coarse_as_their_class_are_spared(noise: float) -> None:
    """The sums of evidence may reach the alarm, but somewhat coarser rounding explains them. 30 nodes show 200 rollouts
    each."""
    honest, shown = measured(noise), rollouts(11, 1_000, 2.0 * noise)
    rng = np.random.default_rng(0)
    for _ in range(30):
        assert tokens_until(ALARM, honest, [shown[place] for place in rng.integers(0, 1_000, 200)]) is None


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
def test_rollouts_of_a_group_with_equal_errors_do_not_convict(noise: float) -> None:
    """Rollouts of a group begin alike, so a large claim error may recur in all eight. Even that must not reach the
    alarm.
    """
    honest = measured(noise)
    weighed_RA = np.array([weigh(one, honest) for one in rollouts(3, 1_000, noise)])
    assert 8 * weighed_RA[:, 3:].max() < ALARM


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
@pytest.mark.parametrize("times", [1.0, 2.0])
def test_a_node_that_forges_a_fifth_is_found(noise: float, times: float) -> None:
    """Forgers must be found within `bound` tokens, also if they round twice as coarsely as their class."""
    honest, bound = measured(noise), 200 if noise < 0.3 else 1_000
    for seed in range(4):
        shown = rollouts(seed, bound // 20, noise * times, forged=0.2)
        found = tokens_until(ALARM, honest, shown)
        assert found is not None and found[1] is Alternative.DRAWS_FORGED


@pytest.mark.parametrize("forged", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("precision", ["f32", "bf16", "q8_0", "q4_k_m", "unknown"])
def test_a_forger_of_any_share_is_found_unmeasured(precision: str, forged: float) -> None:
    """Without a measurement of its class, a node may round four times as coarsely as assumed. That must not excuse a
    forger, in any precision.
    """
    noise = {"f32": 0.003, "bf16": 0.03, "q8_0": 0.08}.get(precision, 0.3)
    found = tokens_until(ALARM, default(NumericsClass("x", precision)), rollouts(9, 50, noise, forged=forged))
    assert found is not None and found[1] is Alternative.DRAWS_FORGED


@pytest.mark.parametrize("noise", NOISES)
def test_a_node_that_forges_one_token_in_fifty_is_found(noise: float) -> None:
    for seed in range(4):
        found = tokens_until(ALARM, measured(noise), rollouts(seed, 100, noise, forged=0.02))
        assert found is not None and found[1] is Alternative.DRAWS_FORGED


@pytest.mark.parametrize(
    ("noise", "bound", "shift"),
    [
        *((noise, bound, sign * 0.3) for noise, bound in ((0.003, 80), (0.02, 120), (0.1, 1_000)) for sign in (1, -1)),
        (0.4, 4_000, -0.3),
        (0.4, 4_000, 0.8),
    ],
)
def test_shifted_claims_are_found(noise: float, bound: int, shift: float) -> None:
    """Claimed log-probabilities are all shifted by .3 nats. Honest rounding in a class of scale .4 makes claims up to
    .64 nats too high, so there only an upward shift of .8 must be found.
    """
    shown = rollouts(1, bound // 20, noise, shift=shift)
    assert tokens_until(ALARM, measured(noise), shown) is not None


@pytest.mark.parametrize(("shift", "side"), [(0.3, Alternative.CLAIMS_TOO_HIGH), (-0.3, Alternative.CLAIMS_TOO_LOW)])
def test_the_direction_of_shifted_claims_is_reported(shift: float, side: Alternative) -> None:
    found = tokens_until(ALARM, measured(0.1), rollouts(2, 50, 0.1, shift=shift))
    assert found is not None and found[1] is side


def test_a_node_with_8_bits_that_declares_32_is_found() -> None:
    """Nodes that claim 32 bits but round 30 or 10 times as coarsely must be found."""
    for noise, bound in ((0.1, 300), (0.03, 600)):
        found = tokens_until(ALARM, measured(0.003), rollouts(5, bound // 20, noise))
        assert found is not None and found[1] is Alternative.COARSER_THAN_SAID


def test_an_exact_engine_of_a_coarse_class_is_honest() -> None:
    assert tokens_until(ALARM, measured(0.1), rollouts(4, 500, 0.0)) is None


@pytest.mark.parametrize(("noise", "times"), [(0.02, 1.0), (0.1, 1.0), (0.4, 1.0), (0.02, 2.0), (0.1, 2.0), (0.4, 2.0)])
def test_honest_greedy_choices_do_not_convict(noise: float, times: float) -> None:
    """Rounding changes the greedy choice only where two tokens are nearly equally likely. Nodes that round twice as
    coarsely as their class are honest as well.
    """
    true, own = logits(np.random.default_rng(5), 8_000, noise * times)
    short = true.max(axis=1) - true[np.arange(len(true)), own.argmax(axis=1)]
    shown = [greedy(part) for part in short.reshape(-1, 20)]
    assert tokens_until(ALARM, measured(noise), shown) is None


def test_a_greedy_answer_of_another_policy_convicts() -> None:
    """Each of the 20 tokens is two nats less likely than the most likely one, far more than rounding explains."""
    assert tokens_until(ALARM, F32, [greedy([2.0] * 20)]) == (20, Alternative.DRAWS_FORGED)


def test_summed_evidence_weighs_as_its_parts() -> None:
    one, other = rollouts(6, 2, 0.1)
    honest = measured(0.1)
    expected = np.add(weigh(one, honest), weigh(other, honest))
    assert weigh(one + other, honest) == pytest.approx(tuple(expected))


def test_a_forger_that_alternates_its_declared_class_is_convicted() -> None:
    """The node reports f32 and a 4-bit engine in turn and forges a tenth of its tokens; a change of class must not
    reset its sums.
    """
    sums = NOTHING
    for number, one in enumerate(rollouts(8, 40, 0.003, forged=0.1)):
        sums = added(sums, weigh(one, (F32, COARSE)[number % 2]))
    assert max(sums) > ALARM


def test_a_class_measured_as_too_coarse_convicts_no_honest_node() -> None:
    """The draws of a sure policy look forged at a scale of 2 nats if the engine rounds by far less. A forger of this
    class is still convicted."""
    honest = Honest(draws=18, claims=18, tolerance=2)
    count, likely = 4_000, np.log(0.97)
    uniforms = 0.97 * (np.arange(count) + 0.5) / count
    sure = Evidence.of(np.zeros(count), np.full(count, likely), uniforms, np.full(count, likely))
    assert max(weigh(sure, honest)) > ALARM
    assert max(judged(NOTHING, sure, sure, honest, ALARM)) < ALARM
    forger = sure + evidence(forged=1_000)
    assert max(judged(NOTHING, forger, forger, honest, ALARM)) > ALARM
