from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.reasons import CLASS_WIDE, convicting, what_is_wrong
from echo_hub.core.trust.standing import Standing, StandingRow

SHOWN = Evidence(draws=(3, 0, 0, 1, 0, 1), claims=(1, 0, 1, 1, 1, 1), bias=-1.2)


def accused(heaviest: int) -> Standing:
    """Return the standing of a node with two checked rollouts. The sum of evidence at index `heaviest` is the largest
    of its sums.
    """
    standing = Standing("a", numerics=NumericsClass(), num_checked=99)
    sums = (*NOTHING[:heaviest], 20.04, *NOTHING[heaviest + 1 :])
    for _ in range(2):
        standing.weigh(sums, SHOWN)
        standing.weigh_rewards(sums, SHOWN)
    return standing


@pytest.mark.parametrize(
    ("heaviest", "said"),
    [
        (
            Alternative.DRAWS_FORGED,
            "Its tokens do not follow from the lease's seed and the named version: 20.0 nats of evidence from 2 "
            "checked rollouts. Of 10 tokens, outside the interval of their draw by more than 0.5 nats: 2, by more than "
            "1 nats: 2.",
        ),
        (
            Alternative.CLAIMS_INVENTED,
            "Its log-probabilities are not those of the named version: 20.0 nats of evidence from 2 checked rollouts. "
            "Of 10 tokens, claimed with other log-odds than the true ones by more than 0.5 nats: 4, by more than 1 "
            "nats: 2.",
        ),
        (
            Alternative.CLAIMS_TOO_LOW,
            "Its log-probabilities are all too low: 20.0 nats of evidence from 2 checked rollouts. Over 10 tokens the "
            "true log-odds are -0.24 nats off on average.",
        ),
        (
            Alternative.SHOPPED,
            "Where rounding allows either of two tokens, it returns the one that earns more: 20.0 nats of evidence "
            "from 2 checked rollouts. Of 10 tokens, outside the interval of their draw by more than 0.5 nats: 2, by "
            "more than 1 nats: 2.",
        ),
    ],
)
def test_a_reason_names_the_heaviest_sum_and_its_evidence(heaviest: Alternative, said: str) -> None:
    assert what_is_wrong(accused(heaviest)) == said


def test_the_reported_evidence_begins_where_the_sum_left_zero() -> None:
    """Sums count from their last zero, so the reported evidence must begin at the same rollout, separately for each
    sum.
    """
    standing = Standing("a")
    standing.weigh((5.0, 0.0, 3.0, *NOTHING[3:]), SHOWN)
    quiet = Evidence(draws=(7, 0, 0, 0, 0, 0), claims=(7, 0, 0, 0, 0, 0))
    standing.weigh((9.0, 0.0, 0.0, *NOTHING[3:]), quiet)
    assert (convicting(standing).num_rollouts, convicting(standing).shown.num_tokens) == (2, 12)
    assert "by more than 1 nats: 1." in what_is_wrong(standing), "the evidence is not of the last rollout alone"
    standing.weigh((0.0, 0.0, 4.0, *NOTHING[3:]), quiet)
    assert (convicting(standing).num_rollouts, convicting(standing).shown) == (1, quiet)
    standing.acquit()
    standing.weigh((2.0, *NOTHING[1:]), quiet)
    assert convicting(standing).num_rollouts == 1
    assert what_is_wrong(standing).endswith("outside the interval of their draw by more than 0.001 nats: 0.")


def test_evidence_from_before_a_restart_is_reported_as_missing() -> None:
    standing = Standing.of(StandingRow(node_id="a", sums=(19.0, *NOTHING[1:])))
    assert what_is_wrong(standing).endswith("19.0 nats of evidence from before the hub's start.")
    standing.weigh((20.0, *NOTHING[1:]), SHOWN)
    assert "from 1 checked rollout, and some before the hub's start. Of 5 tokens" in what_is_wrong(standing)


def test_each_alternative_has_a_text() -> None:
    assert len({what_is_wrong(accused(place)).partition(":")[0] for place in range(len(NOTHING))}) == len(Alternative)


def test_a_common_fault_of_a_class_is_named_numerics() -> None:
    assert CLASS_WIDE.format(numerics=NumericsClass("torch", "bf16", "cuda")) == (
        "Several nodes of torch/bf16/cuda without a common owner round more than expected. So the cause is that "
        "engine, not forgery."
    )
