from __future__ import annotations

from echo_hub.core.step_screen import StepScreen
from echo_hub.core.trust.evidence import Evidence


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
