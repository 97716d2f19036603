from __future__ import annotations

import pytest

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.entropy import adapt
from echo_hub.learner.history import NO_HISTORY, History

HELD = ObjectiveConfig(entropy_coefficient=0.02, entropy_target=0.5, entropy_delta=0.01, entropy_max=0.035)


def test_without_a_target_the_coefficient_is_the_setting() -> None:
    before = History(norms=(1.0,), newest_entropy=0.1, entropy_coefficient=0.3)
    assert adapt(before, ObjectiveConfig()) == (History(norms=(1.0,), newest_entropy=0.1), 0.0)
    assert adapt(before, ObjectiveConfig(entropy_coefficient=0.2)) == (History(norms=(1.0,), newest_entropy=0.1), 0.2)


def test_a_run_with_a_target_by_hand() -> None:
    """Each row: the measured entropy, the adapted coefficient, and the coefficient in use, which is 0 above the target
    and before any measurement.
    """
    history = NO_HISTORY
    steps = [
        (None, 0.02, 0.0),  # No entropy has been measured yet.
        (0.4, 0.03, 0.03),
        (0.3, 0.035, 0.035),  # The coefficient is at its maximum.
        (0.5, 0.035, 0.035),  # At the entropy target, the coefficient stays.
        (0.6, 0.025, 0.0),
        (0.7, 0.015, 0.0),
        (0.8, 0.005, 0.0),
        (0.9, 0.0, 0.0),
        (0.2, 0.01, 0.01),
    ]
    for entropy, coefficient, used in steps:
        history, alpha = adapt(History(newest_entropy=entropy, entropy_coefficient=history.entropy_coefficient), HELD)
        assert (history.entropy_coefficient, alpha) == (pytest.approx(coefficient), pytest.approx(used))
        assert history.newest_entropy == entropy


def test_a_target_set_later_begins_with_the_settings_coefficient() -> None:
    history, _ = adapt(History(newest_entropy=0.4), ObjectiveConfig())
    assert adapt(history, HELD) == (History(newest_entropy=0.4, entropy_coefficient=0.02), 0.02)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"entropy_delta": 0.1}, "entropy_delta needs entropy_target > 0"),
        ({"entropy_max": 1.0}, "entropy_max needs entropy_target > 0"),
        ({"entropy_target": 0.5, "entropy_coefficient": 0.2}, "is above entropy_max = 0.1"),
        ({"entropy_target": -1.0}, "greater than or equal to 0"),
        ({"entropy_coefficient": -1.0}, "greater than or equal to 0"),
    ],
)
def test_meaningless_settings_are_refused(section: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ObjectiveConfig(**section)  # type: ignore[arg-type]
