from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.reasons import not_drawn, what_is_wrong
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
        (0, "Its tokens are not drawn as leased: 20.0"),
        (3, "Its log-probabilities are not its policy's: 20.0"),
        (6, "Its log-probabilities are not its policy's: 20.0"),
        (7, "Its log-probabilities are not its policy's, but all too low: 20.0"),
        (8, "Its log-probabilities are not its policy's, but all too high: 20.0"),
    ],
)
def test_a_nodes_fault_is_what_weighs_most(heaviest: int, said: str) -> None:
    standing = Standing("a", numerics=NumericsClass())
    standing.num_checked = 9
    standing.sums = (*NOTHING[:heaviest], 20.0, *NOTHING[heaviest + 1 :])
    assert what_is_wrong(standing, SHOWN) == (
        f"{said} nats against it after 9 checked rollouts; of the last one's 5 tokens 2 lie far outside the draw, and "
        "3 claims are far off."
    )
