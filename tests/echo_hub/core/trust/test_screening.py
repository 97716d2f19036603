from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.screening import Seen, standing_out

USUAL = Evidence(draws=(900, 50, 30, 15, 4, 1), claims=(900, 50, 30, 15, 4, 1))


def test_a_newer_policy_alone_makes_no_node_stand_out() -> None:
    assert standing_out([Seen("a", USUAL), Seen("b", USUAL), Seen("c", USUAL)], 5.0) == {}


def test_a_node_with_deviating_tokens_stands_out() -> None:
    forged = Evidence(draws=(80, 0, 0, 0, 0, 20), claims=(100, 0, 0, 0, 0, 0))
    found = standing_out([Seen("a", USUAL), Seen("b", USUAL), Seen("c", forged)], 5.0)
    assert found.keys() == {"c"} and found["c"] > 50


def test_all_rollouts_of_a_node_count_together() -> None:
    part = Evidence(draws=(4, 0, 0, 0, 0, 1), claims=(5, 0, 0, 0, 0, 0))
    assert standing_out([Seen("a", USUAL), Seen("c", part)], 5.0) == {}
    assert standing_out([Seen("a", USUAL), *[Seen("c", part)] * 4], 5.0).keys() == {"c"}


@pytest.mark.parametrize(
    "screened", [[], [Seen("a", USUAL)], [Seen("a", Evidence(draws=(0,) * 5 + (99,), claims=(0,) * 6))]]
)
def test_a_node_alone_does_not_stand_out(screened) -> None:
    assert standing_out(screened, 5.0) == {}
