"""Rounding scales (in nats) of engine classes: assumed, measured, learned from nodes, and shown by several dissimilar
nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import NOTHING, alarm, judged
from echo_hub.core.trust.likelihood import NUM_SCALES, SCALES, at_least
from echo_hub.core.trust.numerics import (
    AGREEMENT,
    COARSE_ROUNDING,
    COARSEST,
    DEFAULTS,
    LEARNED,
    LEAST_TOKENS,
    MOST_CLASSES,
    OTHERS,
    ROUNDED_UP,
    ROUNDINGS,
    TOLERANCE,
    TOLERANCE_UNMEASURED,
    Honest,
    Numerics,
    NumericsClass,
    default,
)
from echo_node.config import BackendName, PrecisionName
from echo_shared.wire.messages.engines import BACKENDS, PRECISIONS
from tests.echo_hub.core.trust.simulated import engine, rollouts

TORCH = NumericsClass("torch", "bf16", "cuda")
Q8 = NumericsClass("llama_cpp", "q8_0", "cpu")
FINE, COARSE, COARSER = engine(1, 0.02), engine(2, 0.1), engine(3, 0.4)
"""Simulated evidence of three engines. The most likely rounding scales of their draws and claims are .0156, .088 and
.354 nats, within a step of `SCALES`.
"""


def known(numerics: NumericsClass = Q8, *, measured: Evidence | None = None) -> Numerics:
    """Return `Numerics` (rounding scales of engine classes) that knows one class and, if given, the measurement of this
    class.
    """
    found = Numerics()
    found.known(numerics)
    if measured is not None:
        found.measured(numerics.rounding, measured)
    return found


def most_likely(shown: Evidence) -> tuple[int, int]:
    """Return the indices in `SCALES` of the most likely scales for draws and claims; the scale for draws is at most one
    step below that for claims.
    """
    claims = int(shown.claims_CS[0].argmax())
    return max(int(shown.draws_CS[0].argmax()), claims - 1), claims


def shifted(nats: float, count: int = 600, noise: float = 0.3) -> Evidence:
    """Return the evidence of claims that are too low by `nats` on average (negative: too high), with rounding noise."""
    rng = np.random.default_rng(5)
    claims = Evidence.of_differences(nats + noise * rng.standard_t(4, count))
    return replace(engine(6, noise, count), claims=claims.claims, claim_curves=claims.claim_curves)


# --- assumed scales


@pytest.mark.parametrize(
    ("precision", "rounding"),
    [
        ("f32", "f32"),
        ("float32", "f32"),
        ("F16", "f16"),
        ("bfloat16", "bf16"),
        ("q8_0", "q8_0"),
        ("Q4_K_M", "q4_k_m"),
        *((name, "q4_0") for name in ("q4_0", "q3_k_m", "")),
        ("q1_xxl", "f32"),
    ],
)
def test_a_precision_has_a_rounding(precision: str, rounding: str) -> None:
    assert NumericsClass("x", precision, "y").rounding == rounding


GGUF = NumericsClass("llama_cpp", "q4_1@3fa94c2e", "cpu")


@pytest.mark.parametrize(
    ("weights", "assumed"), [("q8_0", "q8_0"), ("f16", "f16"), ("q4_1", "q4_0"), ("iq3_s", "q4_0")]
)
def test_a_file_of_the_hub_has_a_rounding_of_its_own(weights: str, assumed: str) -> None:
    """Until the hub has measured the file's rounding, the default scale of the file's weight type applies."""
    numerics = NumericsClass("llama_cpp", f"{weights}@3fa94c2e", "cpu")
    assert (numerics.rounding, numerics.assumed_rounding) == (numerics.precision, assumed)
    assert default(numerics) == DEFAULTS[assumed]
    assert (numerics.kind == "fine") == (weights == "f16")


def test_the_file_of_the_run_is_a_class_with_a_measurement_of_its_own() -> None:
    numerics = Numerics(gguf_precision=GGUF.precision)
    assert numerics.known(GGUF) == GGUF
    numerics.measured(GGUF.precision, FINE)
    assert numerics.honest(GGUF).draws < default(GGUF).draws
    same_type = GGUF._replace(precision="q4_0")
    assert numerics.honest(same_type) == default(same_type), "the measurement is of the file only"


@pytest.mark.parametrize("offered", ["", "q4_1@00000000"])
def test_a_file_that_is_not_offered_counts_as_no_report(offered: str) -> None:
    """A node may still name the file that the hub offered before its restart, and a forger may name an invented
    file.
    """
    assert Numerics(gguf_precision=offered).known(GGUF) == GGUF._replace(precision="")


def test_every_rounding_has_a_default() -> None:
    assert {*ROUNDINGS.values(), COARSE_ROUNDING} == set(DEFAULTS)
    assert all(0 <= one.draws <= one.claims < NUM_SCALES for one in DEFAULTS.values())


def test_an_invented_precision_is_judged_no_more_gently_than_a_true_one() -> None:
    made_up = default(NumericsClass("made-up", "q1_xxl", "abacus"))
    assert all(made_up.draws <= one.draws and made_up.claims <= one.claims for one in DEFAULTS.values())


def test_every_declarable_precision_is_judged_and_every_choice_can_be_declared() -> None:
    assert set(PRECISIONS) <= ROUNDINGS.keys()
    assert set(get_args(PrecisionName)) - {"auto"} <= set(PRECISIONS)
    assert set(get_args(BackendName)) - {"auto"} <= set(BACKENDS)


def test_a_node_without_a_precision_counts_as_the_coarsest() -> None:
    coarsest = default(NumericsClass())
    assert coarsest == default(NumericsClass("llama_cpp", "q4_0", "cpu"))
    assert all(one.draws <= coarsest.draws and one.claims <= coarsest.claims for one in DEFAULTS.values())
    assert [float(SCALES[place]) for place in (coarsest.draws, coarsest.claims)] == pytest.approx([0.5, 2**-0.5])


def test_where_nothing_was_measured_the_default_is_assumed() -> None:
    honest = Numerics().honest(TORCH)
    assert honest == DEFAULTS["bf16"] and honest.tolerance == TOLERANCE_UNMEASURED
    assert (float(SCALES[honest.draws]), float(SCALES[honest.claims])) == pytest.approx((0.0625, 0.0884), abs=1e-4)


@pytest.mark.parametrize(("temperature", "steps"), [(1.0, 0), (0.5, 2), (0.25, 4), (2.0, -2)])
def test_default_scales_grow_as_one_over_the_temperature(temperature: float, steps: int) -> None:
    """Temperature T divides the logits and their noise by T, so rounding scales grow as 1 / T. One step between scales
    is a factor of sqrt(2).
    """
    assert Numerics(temperature).honest(TORCH).draws == DEFAULTS["bf16"].draws + steps
    assert default(TORCH, temperature).claims == DEFAULTS["bf16"].claims + steps


def test_no_temperature_is_beyond_the_scales() -> None:
    for temperature in (1e-6, 1e6):
        honest = default(NumericsClass(), temperature)
        assert 0 <= honest.draws < NUM_SCALES and 0 <= honest.claims < NUM_SCALES


def test_two_engines_differ_by_both_scales_together() -> None:
    """Two rounding engines differ by the sum of their scales, rounded up to the next step: .0625 + .125 becomes .25,
    and .0884 + .1768 becomes .354.
    """
    found = DEFAULTS["bf16"].together(DEFAULTS["q8_0"])
    assert (float(SCALES[found.draws]), float(SCALES[found.claims])) == pytest.approx((0.25, 0.35355), abs=1e-4)
    assert found == DEFAULTS["q8_0"].together(DEFAULTS["bf16"])
    exact = Honest(draws=0, claims=0, tolerance=TOLERANCE)
    assert exact.together(DEFAULTS["bf16"]).tolerance == TOLERANCE_UNMEASURED
    assert Honest(draws=20, claims=20).together(Honest(draws=20, claims=20)).draws == NUM_SCALES - 1


# --- measured scales


@pytest.mark.parametrize("shown", [FINE, COARSE, COARSER])
def test_a_measured_scale_is_rounded_up_by_a_step(shown: Evidence) -> None:
    honest, (draws, claims) = known(measured=shown).honest(Q8), most_likely(shown)
    assert honest == Honest(draws=draws + ROUNDED_UP, claims=claims + ROUNDED_UP, tolerance=TOLERANCE)


def test_the_last_measurement_counts() -> None:
    numerics = known(measured=COARSER)
    numerics.measured("q8_0", FINE)
    assert numerics.honest(Q8) == known(measured=FINE).honest(Q8)


def test_a_measurement_holds_for_all_classes_of_its_rounding() -> None:
    numerics = known(measured=COARSE)
    assert numerics.honest(Q8._replace(backend="mlx")) == numerics.honest(Q8)
    assert numerics.honest(TORCH) == DEFAULTS["bf16"]


def test_draws_are_no_finer_than_claims_allow() -> None:
    """Few draws have a uniform u outside the interval of cumulative probability that draws the token, so draws alone
    can make an engine's rounding seem too fine. Here the claimed log-probabilities show rounding that is four steps
    coarser.
    """
    shown = replace(FINE, claim_curves=COARSE.claim_curves)
    assert known(measured=shown).honest(Q8).draws == known(measured=COARSE).honest(Q8).claims - 1


def test_the_coarsest_scale_is_the_last_one() -> None:
    assert known(measured=engine(4, 30.0)).honest(Q8).claims == NUM_SCALES - 1


@pytest.mark.parametrize(
    "nothing", [NO_EVIDENCE, replace(FINE, draw_curves=np.full_like(FINE.draws_CS, np.nan).tobytes())]
)
def test_a_measurement_without_evidence_is_ignored(nothing: Evidence) -> None:
    """Measurements without tokens or numbers are ignored: the finest scale would seem the most likely one, and honest
    nodes would be convicted.
    """
    numerics = known()
    numerics.measured("q8_0", nothing)
    assert numerics.honest(Q8) == DEFAULTS["q8_0"]


# --- learned scales


def test_a_class_learns_from_its_nodes() -> None:
    numerics = known(measured=COARSE)
    shown = engine(5, 0.15)
    numerics.learn(Q8, shown)
    assert numerics.honest(Q8).claims == most_likely(shown)[1] + ROUNDED_UP > known(measured=COARSE).honest(Q8).claims
    numerics.unlearn(Q8, shown)
    assert numerics.honest(Q8) == known(measured=COARSE).honest(Q8)


def test_a_class_is_never_finer_than_measured() -> None:
    """Nodes that report q8_0 but compute exactly may not lower the scale of the class q8_0: its honest nodes would be
    convicted.
    """
    numerics = known(measured=COARSE)
    numerics.learn(Q8, engine(6, 0.0))
    assert numerics.honest(Q8) == known(measured=COARSE).honest(Q8)


def test_a_class_learns_a_few_steps_at_most() -> None:
    numerics, before = known(measured=COARSE), known(measured=COARSE).honest(Q8)
    numerics.learn(Q8, engine(7, 3.0))
    few = replace(before, draws=before.draws + LEARNED, claims=before.claims + LEARNED, too_high=before.too_high + 1)
    assert numerics.honest(Q8) == few


def test_few_tokens_teach_nothing() -> None:
    numerics, before = known(measured=FINE), known(measured=FINE).honest(Q8)
    numerics.learn(Q8, engine(8, 0.4, LEAST_TOKENS - 1))
    assert numerics.honest(Q8) == before
    numerics.learn(Q8, engine(9, 0.4, 1))
    assert numerics.honest(Q8) != before


def test_a_node_is_not_judged_by_its_own_evidence() -> None:
    numerics = known(measured=FINE)
    own, theirs = engine(10, 0.4), engine(11, 0.02)
    numerics.learn(Q8, own)
    assert numerics.honest(Q8, without=own) == known(measured=FINE).honest(Q8)
    numerics.learn(Q8, theirs)
    alone = known(measured=FINE)
    alone.learn(Q8, theirs)
    assert numerics.honest(Q8, without=own) == alone.honest(Q8)


# --- scales shown by unlike nodes


def nodes(*noises: float, forged: float = 0.0) -> list[Evidence]:
    return [engine(20 + number, noise, 600, forged=forged) for number, noise in enumerate(noises)]


def test_three_unlike_nodes_that_agree_make_a_class_coarser() -> None:
    numerics = known(measured=FINE)
    shown = nodes(0.1, 0.1, 0.1)
    assert numerics.class_wide(Q8, shown) == (0, 1, 2)
    honest = numerics.honest(Q8)
    assert honest.draws == max(most_likely(one)[0] for one in shown) + ROUNDED_UP
    ((numerics_class, draws, claims),) = numerics.coarser_than_measured
    assert numerics_class == Q8 and (draws, claims) == (SCALES[honest.draws], SCALES[honest.claims])
    restarted = known(measured=FINE)
    restarted.restore(numerics.coarser_than_measured)
    assert restarted.honest(Q8) == honest


def test_a_class_of_which_nothing_was_measured_can_be_coarser() -> None:
    numerics = known(TORCH)
    assert numerics.class_wide(TORCH, nodes(0.4, 0.4, 0.4)) == (0, 1, 2)
    assert numerics.honest(TORCH).tolerance == TOLERANCE_UNMEASURED


def test_two_nodes_that_agree_do_not() -> None:
    numerics = known(measured=FINE)
    assert numerics.class_wide(Q8, nodes(0.1, 0.1)) == () and numerics.coarser_than_measured == ()
    assert numerics.honest(Q8) == known(measured=FINE).honest(Q8)


def test_a_minority_that_agrees_does_not() -> None:
    """Three of a class's seven nodes are too few to change the scale of the class; three of six are enough."""
    numerics = known(measured=FINE)
    assert numerics.class_wide(Q8, nodes(0.1, 0.1, 0.1, 0.02, 0.02, 0.02, 0.02)) == ()
    assert numerics.class_wide(Q8, nodes(0.1, 0.1, 0.1, 0.02, 0.02, 0.02)) == (0, 1, 2)


def test_nodes_with_other_rounding_than_the_accused_do_not() -> None:
    """Other nodes' coarse rounding excuses only a node that rounds alike. The accused node here rounds sixteen times as
    coarsely as the other nodes.
    """
    numerics = known(measured=FINE)
    assert numerics.class_wide(Q8, nodes(0.8, 0.05, 0.05)) == ()


@pytest.mark.parametrize("forged", [0.05, 0.2, 1.0])
def test_conspirators_that_forge_do_not(forged: float) -> None:
    for noise in (0.0, 0.02, 0.1):
        numerics = known(measured=FINE)
        assert numerics.class_wide(Q8, nodes(noise, noise, noise, forged=forged)) == ()
        assert numerics.honest(Q8) == known(measured=FINE).honest(Q8)


def test_conspirators_that_invent_claims_do_not() -> None:
    rng = np.random.default_rng(30)
    shown = [
        replace(engine(30 + number, 0.02, 600), claim_curves=invented.claim_curves)
        for number in range(3)
        for invented in [Evidence.of_differences(2.0 * rng.standard_t(4, 600))]
    ]
    numerics = known(measured=FINE)
    assert numerics.class_wide(Q8, shown) == ()


def test_a_forger_among_coarse_nodes_is_not_spared_with_them() -> None:
    numerics = known(measured=FINE)
    forger, *others = (*nodes(0.1, forged=0.2), *nodes(0.1, 0.1, 0.1))
    assert numerics.class_wide(Q8, [forger, *others]) == ()


def test_nodes_that_round_as_expected_change_nothing() -> None:
    numerics = known(measured=COARSE)
    assert numerics.class_wide(Q8, nodes(0.1, 0.1, 0.1)) == () and numerics.coarser_than_measured == ()


def test_no_class_is_taken_for_coarser_than_a_nat() -> None:
    numerics = known(measured=FINE)
    numerics.class_wide(Q8, nodes(3.0, 3.0, 3.0))
    honest = numerics.honest(Q8)
    assert honest.draws <= COARSEST and honest.claims <= COARSEST + 1


def test_a_finer_measurement_later_does_not_undo_it() -> None:
    """Scales shown by several dissimilar nodes stay until the hub stops."""
    numerics = known(measured=FINE)
    numerics.class_wide(Q8, nodes(0.1, 0.1, 0.1))
    before = numerics.honest(Q8)
    numerics.measured("q8_0", FINE)
    assert numerics.honest(Q8) == before and AGREEMENT == 2


# --- names


def test_made_up_names_take_a_bounded_place() -> None:
    numerics = Numerics()
    found = {numerics.known(NumericsClass(f"engine {number}")) for number in range(MOST_CLASSES + 50)}
    assert len(found) == MOST_CLASSES + 1 and OTHERS in found
    assert numerics.known(NumericsClass("engine 3")) == NumericsClass("engine 3")
    assert numerics.honest(OTHERS) == default(NumericsClass())
    assert numerics.honest(NumericsClass("never seen", "f32")) == DEFAULTS["f32"]
    assert at_least(0.0055) == DEFAULTS["f32"].draws


def test_a_class_has_a_name() -> None:
    assert str(TORCH) == "torch/bf16/cuda" and str(NumericsClass("mlx")) == "mlx/?/?"


# --- finer than declared


def test_a_node_with_far_finer_claims_is_judged_by_finer_draws() -> None:
    """If the class's scale applied, an exact node could report four bits and choose its tokens within the class's
    tolerance. A node near the class's scale is judged by the class.
    """
    numerics = known(measured=COARSER)
    of_class = numerics.honest(Q8)
    for shown in (COARSER, engine(4, 0.2), engine(5, 0.1), NO_EVIDENCE):
        assert numerics.honest(Q8, shown=shown) == of_class
    exact = numerics.honest(Q8, shown=engine(6, 0.0005))
    assert exact == replace(of_class, draws=at_least(0.01)) and SCALES[of_class.draws] > 0.3


@pytest.mark.parametrize("coarse", [1.0, 0.5, 0.1, 0.05])
def test_an_engine_that_rounds_some_prompts_finely_is_judged_by_its_class(coarse: float) -> None:
    numerics = known(measured=COARSER)
    tokens = 20_000
    mixture = engine(7, 0.0005, round(tokens * (1 - coarse))) + engine(8, 0.4, round(tokens * coarse))
    assert numerics.honest(Q8, shown=mixture) == numerics.honest(Q8)


def test_few_tokens_and_classes_that_were_not_measured_tell_nothing() -> None:
    exact = engine(6, 0.0005)
    few = engine(6, 0.0005, 40)
    numerics = known(measured=COARSER)
    assert numerics.honest(Q8, shown=few) == numerics.honest(Q8)
    assert known().honest(Q8, shown=exact) == known().honest(Q8)
    sure = replace(NO_EVIDENCE, draws=(100_000, 0, 0, 0, 0, 0), claims=(99_999, 1, 0, 0, 0, 0))
    fine = known(measured=engine(9, 0.001))
    assert fine.honest(Q8, shown=sure) == fine.honest(Q8), "a class that is exact itself"


def test_an_exact_node_that_declares_four_bits_cannot_shop() -> None:
    """This node computes exactly, but chooses tokens as a coarse engine might in a fifth of its rollouts. The scale of
    its declared class would excuse that; the scale that its exact claims show must not.
    """
    numerics, enough = known(measured=COARSER), alarm(1e-6)
    of_class = numerics.honest(Q8)
    honest = rollouts(10, 400, 0.0005)
    chosen = rollouts(11, 100, 0.4)
    shown = [one for number in range(100) for one in (*honest[4 * number : 4 * number + 4], chosen[number])]
    exact = [replace(one, claims=(one.num_tokens, 0, 0, 0, 0, 0)) for one in shown]
    recent, sums, convicted = NO_EVIDENCE, NOTHING, {}
    for name, by in (("class", of_class), ("own", numerics.honest(Q8, shown=sum(exact[1:], exact[0])))):
        sums = NOTHING
        for number, one in enumerate(exact):
            sums = judged(sums, one, recent, by, enough)
            if max(sums[:3]) >= enough:
                convicted[name] = number
                break
    assert set(convicted) == {"own"}


# --- claims that are all too low or too high


@pytest.mark.parametrize(("nats", "low", "high"), [(0.0, 0, 0), (0.3, 1, 0), (0.6, 2, 0), (-0.4, 0, 1), (9.0, 3, 0)])
def test_honest_claims_may_be_shifted_as_far_as_measured(nats: float, low: int, high: int) -> None:
    honest = known(measured=shifted(nats)).honest(Q8)
    assert (honest.too_low, honest.too_high) == (low, high)


def test_an_honest_node_with_measured_shift_is_not_convicted() -> None:
    """In an engine of 8 bits, a trained policy is less sure of its tokens, so all claims are too low. Lower claims than
    that still convict.
    """
    honest, naive = (known(measured=shifted(shift)).honest(Q8) for shift in (0.3, 0.0))
    one, lower = shifted(0.3, 4_000), shifted(0.9, 4_000)
    assert max(judged(NOTHING, one, NO_EVIDENCE, naive, alarm(1e-6))) > alarm(1e-6)
    assert max(judged(NOTHING, one, NO_EVIDENCE, honest, alarm(1e-6))) < 1.0
    assert max(judged(NOTHING, lower, NO_EVIDENCE, honest, alarm(1e-6))) > alarm(1e-6)


def test_nodes_of_a_class_raise_its_shift_by_one_step() -> None:
    numerics = known(measured=shifted(0.0))
    numerics.learn(Q8, shifted(0.8))
    assert numerics.honest(Q8).too_low == 1
    assert numerics.honest(Q8, without=shifted(0.8)).too_low == 0


def test_shifts_of_two_classes_add_up_for_comparing_their_findings() -> None:
    one, other = Honest(draws=1, claims=1, too_low=1), Honest(draws=1, claims=1, too_high=2)
    assert (one.together(other).too_low, one.together(other).too_high) == (3, 3)
    assert one.together(one).too_low == 1
