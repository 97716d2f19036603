from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from typing import Final

import numpy as np
import pytest

from echo_hub.core.trust.evidence import NO_EVIDENCE
from echo_hub.core.trust.judging import DRAWS_DISPERSION, NOTHING, TILTS, Alternative
from echo_hub.core.trust.likelihood import NUM_SCALES
from echo_hub.core.trust.numerics import Honest
from echo_hub.core.trust.shopping import (
    LEAST_VARIANCE,
    MOST_WAITING,
    RECENT,
    REMEMBERED,
    TOLERANCE,
    Edges,
    LatestRewards,
    Shopping,
    UsualRank,
    edges,
    weigh,
)
from tests.echo_hub.core.trust.shoppers import (
    ALARM,
    NOISES,
    World,
    convicted,
    honest,
    nats,
    rewards,
    scale_of,
    shopper,
    shown,
)
from tests.echo_hub.core.trust.simulated import evidence

ONE: Final = Edges("a", 0.8, 0.2, NO_EVIDENCE)


# --- computed by hand


def test_edges_are_read_at_the_scale_of_the_class() -> None:
    near = np.arange(2.0 * NUM_SCALES).tobytes()
    found = edges("a", replace(evidence(3), near_edges=near), Honest(draws=4, claims=9))
    assert found == Edges("a", 4.0, NUM_SCALES + 4.0, evidence(3).counts)


def test_a_rollouts_weight_follows_the_inequality() -> None:
    """Formula of `trust.shopping`: reward excess R = .5, variance W = .2 and the second tilt λ = .4 give x = .4 * .5 /
    sqrt(.2 + .05) = .4.
    """
    x = TILTS[1] * 0.5 / sqrt(0.2 + LEAST_VARIANCE)
    allowed = 0.2 * (exp(x) - 1 - x) + TOLERANCE * x * sqrt(0.2)
    weighed = weigh(ONE, 0.5)
    assert len(weighed) == len(NOTHING) and weighed[: Alternative.SHOPPED] == NOTHING[: Alternative.SHOPPED]
    assert weighed[Alternative.SHOPPED + 1] == pytest.approx((0.8 * x - allowed) / DRAWS_DISPERSION)
    assert weigh(ONE, -0.5)[Alternative.SHOPPED + 1] == pytest.approx((-0.8 * x - allowed) / DRAWS_DISPERSION)
    assert weigh(ONE, 0.0) == NOTHING


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("excess", [-1.0, 0.3, 1.0])
def test_an_exact_token_weighs_nothing_on_average(share: float, excess: float) -> None:
    """If the random number u of a draw is near the edge to another token in a `share` of tokens, E exp(weight) must be
    at most 1: this bounds the rate of false alarms.
    """
    variance = share * (1.0 - share)
    near, far = (weigh(Edges("a", count - share, variance, NO_EVIDENCE), excess) for count in (1.0, 0.0))
    for place in range(Alternative.SHOPPED, len(NOTHING)):
        assert share * exp(near[place]) + (1.0 - share) * exp(far[place]) <= 1.0


def test_a_rank_is_among_the_latest_rewards() -> None:
    ranks = LatestRewards()
    assert [ranks.rank(reward) for reward in (3.0, 5.0, 3.0, 1.0)] == [0.0, 1.0, -0.5, -1.0]
    for _ in range(RECENT):
        ranks.rank(7.0)
    assert (ranks.rank(7.0), ranks.rank(6.0)) == (0.0, -1.0)


def test_a_rank_counts_from_the_nodes_own_mean() -> None:
    usual = UsualRank()
    assert usual.excess(0.5, ONE) == 0.5
    weight = 0.2 / sqrt(0.2 + LEAST_VARIANCE)
    assert usual.excess(0.5, ONE) == pytest.approx(0.5 - 0.5 * weight / (1.0 + weight))
    for _ in range(1_000):
        usual.excess(-1.0, ONE)
    assert usual.excess(1.0, ONE) == 1.0, "never more"
    assert usual.weight <= 2.0 * REMEMBERED and usual.total / usual.weight == pytest.approx(-1.0, abs=0.02)


@pytest.mark.parametrize("is_checked_first", [True, False])
def test_check_and_reward_come_together_in_any_order(is_checked_first: bool) -> None:
    shopping = Shopping()
    shopping.scored(["other"], 1.0, ())
    if is_checked_first:
        assert shopping.checked("r", [ONE]) is None
        assert shopping.scored(["r"], 2.0, ()) == (1.0, [("r", (ONE,))])
    else:
        assert shopping.scored(["r"], 2.0, ("r",)) == (1.0, [])
        assert shopping.checked("r", [ONE]) == 1.0
    assert shopping.scored(["r"], 2.0, ()) == (0.5, []), "each rollout counts once"


def test_all_turns_of_an_episode_have_its_reward() -> None:
    shopping = Shopping()
    shopping.checked("first", [ONE])
    shopping.checked("last", [ONE])
    assert shopping.scored(["first", "second", "last"], 1.0, ()) == (0.0, [("first", (ONE,)), ("last", (ONE,))])


def test_the_number_of_waiting_rollouts_is_bounded() -> None:
    shopping = Shopping()
    for number in range(MOST_WAITING + 1):
        shopping.checked(f"r{number}", [ONE])
    assert shopping.scored(["r0"], 1.0, ())[1] == [] and shopping.scored(["r1"], 1.0, ())[1]


def test_uninformative_tokens_do_not_wait() -> None:
    shopping = Shopping()
    shopping.checked("r", [ONE._replace(variance=0.0)])
    assert shopping.scored(["r"], 1.0, ())[1] == []


# --- simulated


@pytest.fixture(scope="module")
def world() -> World:
    return World(0)


@pytest.mark.parametrize("precision", NOISES)
def test_an_honest_node_is_not_convicted_in_50_000_rollouts(world: World, precision: str) -> None:
    """During the run the policy learns, and rewards depend on the length. Neither may look like shopping (taking a
    neighbouring token for its reward).
    """
    known, drawn = scale_of(world, precision), honest(world, precision, 50_000)
    found = shown(drawn, NOISES[precision])
    assert drawn[-1].solved_R.mean() > drawn[0].solved_R.mean() + 0.1
    for price in (0.5, -0.5):
        earned = rewards(drawn, lambda one, price=price: one.solved_R - price * one.lengths_R)
        number, largest = convicted(found, earned, known)
        assert number is None and largest < ALARM / 2


@pytest.mark.parametrize("precision", NOISES)
def test_an_honest_node_may_earn_by_how_unsure_it_is(world: World, precision: str) -> None:
    """Rewards that grow with the number of draws near the edge to another token are the worst honest case, because the
    test for shopping (choosing tokens by reward) measures just that number.
    """
    known, drawn = scale_of(world, precision), honest(world, precision, 10_000, seed=1)
    found = shown(drawn, NOISES[precision])
    variances = [float(one.edges_CS[1, known.draws]) for one in found]
    assert convicted(found, variances, known)[0] is None
    assert convicted(found, [-variance for variance in variances], known)[0] is None


@pytest.mark.parametrize("precision", NOISES)
@pytest.mark.parametrize("diluted", [0.0, 0.3])
def test_a_shopper_that_hides_its_choices_is_convicted(world: World, precision: str, diluted: float) -> None:
    """Shoppers can also take neighbours of equal reward, to hide those of higher reward. They must be convicted all the
    same.
    """
    known = scale_of(world, precision)
    drawn = shopper(world, 8_000, farthest=3.0 * nats(known), diluted=diluted)
    number, _ = convicted(shown(drawn, NOISES[precision]), rewards(drawn, lambda one: one.solved_R), known)
    assert number is not None


@pytest.mark.parametrize("precision", NOISES)
def test_an_exact_node_that_does_not_shop_is_spared(world: World, precision: str) -> None:
    known, drawn = scale_of(world, precision), shopper(world, 8_000, farthest=0.0)
    assert convicted(shown(drawn, NOISES[precision]), rewards(drawn, lambda one: one.solved_R), known)[0] is None
