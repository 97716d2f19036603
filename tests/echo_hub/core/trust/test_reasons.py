from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.reasons import CLASS_WIDE, not_drawn, what_is_wrong
from echo_hub.core.trust.standing import Standing

SHOWN = Evidence(draws=(3, 0, 0, 1, 0, 1), claims=(1, 0, 1, 1, 1, 1))


def test_a_rollouts_fault_is_counted_in_tokens() -> None:
    one = Evidence(draws=(0, 0, 0, 0, 0, 1), claims=(1, 0, 0, 0, 0, 0))
    assert not_drawn(SHOWN, 7) == (
        "Of 5 tokens, not what version 7 draws from the lease's seed: 2; claimed with another log-probability than it "
        "gives: 3."
    )
    assert not_drawn(one, 0).startswith("Of 1 token, ")


@pytest.mark.parametrize(
    ("heaviest", "said"),
    [
        (Alternative.DRAWS_FORGED, "Its tokens do not follow from the lease's seed and the named version"),
        (Alternative.CLAIMS_INVENTED, "Its log-probabilities are not those of the named version"),
        (Alternative.CLAIMS_TOO_LOW, "Its log-probabilities are all too low"),
        (Alternative.CLAIMS_TOO_HIGH, "Its log-probabilities are all too high"),
        (Alternative.COARSER_THAN_SAID, "Its engine computes in fewer bits than it says"),
    ],
)
def test_a_nodes_fault_is_what_weighs_most(heaviest: Alternative, said: str) -> None:
    sums = (*NOTHING[:heaviest], 20.04, *NOTHING[heaviest + 1 :])
    standing = Standing("a", numerics=NumericsClass(), num_checked=9, sums=sums)
    assert what_is_wrong(standing) == f"{said}: 20.0 nats of evidence, 9 checked rollouts."
    standing.num_checked = 1
    assert what_is_wrong(standing).endswith("1 checked rollout.")


def test_each_alternative_has_its_words() -> None:
    rows = ((*NOTHING[:place], 1.0, *NOTHING[place + 1 :]) for place in range(len(NOTHING)))
    assert len({what_is_wrong(Standing("a", sums=sums)) for sums in rows}) == len(Alternative)


def test_what_a_class_shows_is_named_numerics() -> None:
    assert CLASS_WIDE.format(numerics=NumericsClass("torch", "bf16", "cuda")) == (
        "Unlike nodes of torch/bf16/cuda all round more than expected: numerics of that engine, not forgery."
    )
