"""The sequential test: by hand, and on simulated engines that are honest, coarse, or forging."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

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
"""Scales of logit noise, close to those of f16, bf16 and q8_0."""


def measured(noise: float) -> Honest:
    """Return the hub's scales for a class whose engines have this noise."""
    numerics = Numerics()
    numerics.measured("q8_0", engine(7, noise))
    return numerics.honest(NumericsClass("x", "q8_0", "cpu"))


# --- computed by hand


def test_the_alarm_bounds_all_alternatives_together() -> None:
    """ln(12 / 1e-6) = 16.3004."""
    assert len(NOTHING) == 12
    assert alarm(1e-6) == pytest.approx(16.3004, abs=1e-4)


def test_an_honest_token_lowers_its_nodes_sums() -> None:
    """Weigh a token of 50 %, far from its edges: f = 2 (1 - 1e-4) + 1e-4, and ln(.8 + .2 / 1.9999) / 1.5 = -.07024."""
    expected = [log(1 - w + w / (2 - OUTLIERS)) / DRAWS_DISPERSION for w in WEIGHTS]
    assert weigh(evidence(1), F32)[:3] == pytest.approx(expected, rel=1e-6)
    assert expected[0] == pytest.approx(-0.07024, abs=1e-5)


def test_forged_tokens_add_up_for_each_share() -> None:
    """Three forged and thirty honest tokens: (3 * 7.6014 - 30 * .10536) / 1.5, and so on for shares of .02 and .002."""
    expected = [3 * log(1 - w + w / OUTLIERS) + 30 * log(1 - w + w / 2) for w in WEIGHTS]
    assert weigh(evidence(30, forged=3), F32)[:3] == pytest.approx(
        [one / DRAWS_DISPERSION for one in expected], abs=1e-2
    )


def test_four_forged_tokens_convict_and_three_do_not() -> None:
    """Their sums are 4 * 7.6014 / 1.5 = 20.3 nats, and 15.2."""
    assert tokens_until(ALARM, F32, [evidence(forged=4)]) == (4, Alternative.DRAWS_FORGED)
    assert tokens_until(ALARM, F32, [evidence(forged=3)]) is None


def test_a_forged_end_after_an_honest_beginning_convicts() -> None:
    """4,000 honest tokens lower only the sums for large shares of forged tokens."""
    weighed = weigh(evidence(4_000, forged=20), F32)
    assert weighed[0] < 0.0 and max(weighed) > ALARM


def test_claims_weigh_a_quarter() -> None:
    """Weigh a claim 2 below the truth at scale 1: t(2) = .06804; invented claims have density t(1) / 2 = .19245 / 2."""
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
    """Weigh an error of eight scales: t(1) / 8 at the coarser scale, which is eight times as wide, and t(8) at the
    class's.

    So the weight is ln(1.5**-1.5 / 8) - ln(33**-1.5) = 2.557.
    """
    honest = Honest(draws=8, claims=8)
    error = 8 * float(SCALES[8])
    coarse, own = log(1.5**-1.5 / 8), log(33.0**-1.5)
    assert weigh(evidence(1, error=error), honest)[8] == pytest.approx((coarse - own) / CLAIMS_DISPERSION, abs=1e-2)


def test_without_a_coarser_scale_coarseness_weighs_nothing() -> None:
    """COARSER steps above the class's scale lie beyond the last one."""
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
    """ln(1e-3) / -.10536 = 65.6 tokens."""
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
    """Forged tokens alone, and after honest ones that show how finely the node rounds."""
    assert not is_explained(evidence(forged=forged), F32, Alternative.DRAWS_FORGED, ALARM)
    assert not is_explained(evidence(1_000, forged=forged), F32, Alternative.DRAWS_FORGED, ALARM)


@pytest.mark.parametrize(
    "alternative", [Alternative.CLAIMS_TOO_LOW, Alternative.COARSER_THAN_SAID, Alternative.SHOPPED]
)
def test_rounding_explains_neither_low_claims_nor_far_fewer_bits(alternative: Alternative) -> None:
    assert not is_explained(engine(3, 0.1, 1_000), measured(0.1), alternative, ALARM)


def test_rounding_explains_claims_too_high_by_its_variance() -> None:
    """Noise of .8 makes claims .32 nats too high. Twice the scale of .4 explains that.

    No tolerance explains as much for an engine with noise of .1.
    """
    assert is_explained(engine(3, 0.8, 2_000), measured(0.4), Alternative.CLAIMS_TOO_HIGH, ALARM)
    assert not is_explained(engine(3, 0.1, 2_000, shift=0.32), measured(0.1), Alternative.CLAIMS_TOO_HIGH, ALARM)
    assert not is_explained(engine(3, 0.4, 2_000, shift=0.8), measured(0.4), Alternative.CLAIMS_TOO_HIGH, ALARM)


def test_an_explained_sum_is_reset_and_the_others_stay() -> None:
    """Let one sum of a node that rounds twice as coarsely as its class reach the alarm."""
    honest, recent = measured(0.02), engine(3, 0.04)
    before = tuple(ALARM - 1e-6 if place == Alternative.CLAIMS_INVENTED else ALARM / 2 for place in range(len(NOTHING)))
    one = evidence(1, error=0.3)
    expected = list(added(before, weigh(one, honest)))
    assert expected[Alternative.CLAIMS_INVENTED] > ALARM > max(expected[Alternative.CLAIMS_TOO_LOW :])
    expected[Alternative.CLAIMS_INVENTED] = 0.0
    assert judged(before, one, recent, honest, ALARM) == tuple(expected)


@pytest.mark.parametrize("alternative", [Alternative.DRAWS_FORGED, Alternative.CLAIMS_INVENTED])
def test_rounding_within_the_tolerance_is_explained(alternative: Alternative) -> None:
    """Twice the class's scale is explained, sixteen times is not."""
    honest = measured(0.02)
    assert is_explained(engine(3, 0.04), honest, alternative, ALARM)
    assert not is_explained(engine(3, 0.32), honest, alternative, ALARM)


# --- simulated engines


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
@pytest.mark.parametrize("times", [0.7, 1.0])
def test_400_honest_nodes_are_never_convicted(noise: float, times: float) -> None:
    """Each node shows 300 rollouts of 20 tokens, taken from 1,000; it rounds as coarsely as its class, or less."""
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
    """30 nodes show 200 rollouts each; whatever their sums reach, none is convicted."""
    honest, shown = measured(noise), rollouts(11, 1_000, 2.0 * noise)
    rng = np.random.default_rng(0)
    for _ in range(30):
        assert tokens_until(ALARM, honest, [shown[place] for place in rng.integers(0, 1_000, 200)]) is None


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
def test_rollouts_of_a_group_with_equal_errors_do_not_convict(noise: float) -> None:
    """Eight rollouts of a group have the same claim error, in each of 1,000 groups."""
    honest = measured(noise)
    weighed_RA = np.array([weigh(one, honest) for one in rollouts(3, 1_000, noise)])
    assert 8 * weighed_RA[:, 3:].max() < ALARM


@pytest.mark.parametrize("noise", [*NOISES, 0.4])
@pytest.mark.parametrize("times", [1.0, 2.0])
def test_a_node_that_forges_a_fifth_is_found(noise: float, times: float) -> None:
    """Find it as fast if it also rounds twice as coarsely as its class."""
    honest, bound = measured(noise), 200 if noise < 0.3 else 1_000
    for seed in range(4):
        shown = rollouts(seed, bound // 20, noise * times, forged=0.2)
        found = tokens_until(ALARM, honest, shown)
        assert found is not None and found[1] is Alternative.DRAWS_FORGED


@pytest.mark.parametrize("forged", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("precision", ["f32", "bf16", "q8_0", "q4_k_m", "unknown"])
def test_a_forger_of_any_share_is_found_unmeasured(precision: str, forged: float) -> None:
    """Without measurements, a node may round four times as coarsely as assumed.

    Forgers of all or some tokens are found in every precision.
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
    """Noise of .8, judged as .4, makes claims up to .64 nats too high."""
    shown = rollouts(1, bound // 20, noise, shift=shift)
    assert tokens_until(ALARM, measured(noise), shown) is not None


@pytest.mark.parametrize(("shift", "side"), [(0.3, Alternative.CLAIMS_TOO_HIGH), (-0.3, Alternative.CLAIMS_TOO_LOW)])
def test_the_direction_of_shifted_claims_is_reported(shift: float, side: Alternative) -> None:
    found = tokens_until(ALARM, measured(0.1), rollouts(2, 50, 0.1, shift=shift))
    assert found is not None and found[1] is side


def test_a_node_with_8_bits_that_declares_32_is_found() -> None:
    """Nodes that round thirty, then ten times as coarsely as they declare."""
    for noise, bound in ((0.1, 300), (0.03, 600)):
        found = tokens_until(ALARM, measured(0.003), rollouts(5, bound // 20, noise))
        assert found is not None and found[1] is Alternative.COARSER_THAN_SAID


def test_an_exact_engine_of_a_coarse_class_is_honest() -> None:
    assert tokens_until(ALARM, measured(0.1), rollouts(4, 500, 0.0)) is None


@pytest.mark.parametrize(("noise", "times"), [(0.02, 1.0), (0.1, 1.0), (0.4, 1.0), (0.02, 2.0), (0.1, 2.0), (0.4, 2.0)])
def test_honest_greedy_choices_do_not_convict(noise: float, times: float) -> None:
    """Rounding changes the most likely token where two are nearly equally likely.

    Nodes that round twice as coarsely as their class are honest here too, in 400 rollouts of 20 tokens.
    """
    true, own = logits(np.random.default_rng(5), 8_000, noise * times)
    short = true.max(axis=1) - true[np.arange(len(true)), own.argmax(axis=1)]
    shown = [greedy(part) for part in short.reshape(-1, 20)]
    assert tokens_until(ALARM, measured(noise), shown) is None


def test_a_greedy_answer_of_another_policy_convicts() -> None:
    """Twenty tokens, each two nats less likely than the most likely one."""
    assert tokens_until(ALARM, F32, [greedy([2.0] * 20)]) == (20, Alternative.DRAWS_FORGED)


def test_summed_evidence_weighs_as_its_parts() -> None:
    one, other = rollouts(6, 2, 0.1)
    honest = measured(0.1)
    expected = np.add(weigh(one, honest), weigh(other, honest))
    assert weigh(one + other, honest) == pytest.approx(tuple(expected))


def test_a_forger_that_alternates_its_declared_class_is_convicted() -> None:
    """Alternate the declared class between f32 and q4, and forge a tenth."""
    sums = NOTHING
    for number, one in enumerate(rollouts(8, 40, 0.003, forged=0.1)):
        sums = added(sums, weigh(one, (F32, COARSE)[number % 2]))
    assert max(sums) > ALARM
