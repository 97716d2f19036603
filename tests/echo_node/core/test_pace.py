"""How many rollouts a node asks for: no more than it can finish before their deadline. The expected numbers are
computed by hand.
"""

from __future__ import annotations

from echo_node.core.pace import OwnPace


def test_unknown_values_limit_nothing() -> None:
    pace = OwnPace()
    assert pace.affordable(64) == 64
    pace.tokens_per_s = 10.0
    assert pace.affordable(64) == 64


def test_half_of_the_deadline_is_used() -> None:
    pace = OwnPace()
    pace.tokens_per_s = 100.0
    pace.leased(60.0, 300)
    # 100 tokens/s for 30 s (half of the deadline) are 3000 tokens: 10 rollouts of at most 300 tokens.
    assert pace.affordable(64) == 10
    assert pace.affordable(4) == 4


def test_actual_lengths_count_more_than_maximum_lengths() -> None:
    pace = OwnPace()
    pace.leased(60.0, 300)
    pace.finished(50, 100.0, full=True)
    pace.finished(150, 100.0, full=True)
    pace.leased(60.0, 300)
    assert pace.affordable(64) == 30


def test_one_rollout_is_always_affordable() -> None:
    pace = OwnPace()
    pace.tokens_per_s = 0.001
    pace.leased(1.0, 10_000)
    assert pace.affordable(64) == 1


def test_small_changes_are_not_told() -> None:
    pace = OwnPace()
    pace.leased(100.0, 100)
    for tokens_per_s, told in ((40.0, 20), (45.0, 20), (36.0, 20), (52.0, 26), (60.0, 26), (10.0, 5)):
        pace.tokens_per_s = tokens_per_s
        assert pace.affordable(64) == told


def test_a_rate_measured_with_little_work_does_not_lower_the_pace() -> None:
    """An engine with few rollouts draws fewer tokens a second than a fully loaded one. If that speed counted, the node
    would ask for ever fewer rollouts.
    """
    pace = OwnPace()
    pace.leased(120.0, 512)
    pace.finished(512, 256.0, full=True)
    assert pace.affordable(64) == 30
    for _ in range(50):
        pace.finished(512, 8.0, full=False)
    assert pace.affordable(64) == 30
    pace.finished(512, 128.0, full=True)
    assert pace.affordable(64) == 15
