from __future__ import annotations

import pytest

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.screening import LEAST_TOKENS, SHOWN, STEPS, Mismatch, Seen, StepScreen, standing_out

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


def evidence(tokens: int, kl: float) -> Evidence:
    return Evidence(draws=(tokens, 0, 0, 0, 0, 0), claims=(tokens, 0, 0, 0, 0, 0), mismatch_kl=kl)


def test_the_largest_mismatch_comes_first() -> None:
    seen = Mismatch()
    assert seen.largest == ()
    seen.add([Seen("a", evidence(100, 1.0)), Seen("b", evidence(50, 1.0)), Seen("a", evidence(100, 2.0))])
    seen.add([Seen("b", evidence(150, 9.0)), Seen("few", evidence(LEAST_TOKENS - 1, 99.0))])
    assert [(node.node_id, node.num_tokens) for node in seen.largest] == [("b", 200), ("a", 200)]
    assert [node.kl for node in seen.largest] == pytest.approx([0.05, 0.015])


def test_old_mismatches_are_forgotten() -> None:
    seen = Mismatch()
    seen.add([Seen("old", evidence(100, 5.0))])
    for _ in range(STEPS - 1):
        seen.add([Seen("new", evidence(100, 1.0))])
    assert [node.node_id for node in seen.largest] == ["old", "new"]
    seen.add([])
    assert [node.node_id for node in seen.largest] == ["new"]


def test_of_many_nodes_some_are_named() -> None:
    seen = Mismatch()
    seen.add(Seen(f"n{number}", evidence(100, float(number))) for number in range(10 * SHOWN))
    assert [node.node_id for node in seen.largest] == [f"n{10 * SHOWN - 1 - place}" for place in range(SHOWN)]


def test_the_learners_screening_report_is_parsed() -> None:
    said = {
        "left_out": [1],
        "suspects": [4, 5],
        "screened": [0, 4],
        "draws": [[3, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2]],
        "claims": [[3, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]],
        "mismatch_kl": [0.0, 1.5],
    }
    screen = StepScreen.of(said)
    assert (screen.left_out, screen.suspects) == ((1,), (4, 5))
    assert screen.screened == {
        0: Evidence(draws=(3, 0, 0, 0, 0, 0), claims=(3, 0, 0, 0, 0, 0)),
        4: Evidence(draws=(0, 0, 0, 0, 0, 2), claims=(0, 0, 0, 0, 1, 1), mismatch_kl=1.5),
    }
    assert StepScreen.of({}) == StepScreen()
