from __future__ import annotations

import json

from echo_hub.learner.history import NO_HISTORY, History


def test_a_history_is_restored_from_json_exactly() -> None:
    history = History(norms=(0.1, 1 / 3), newest_entropy=2 / 7, entropy_coefficient=0.1 + 0.2)
    assert History.of_frame(json.loads(json.dumps(history.frame()))) == history


def test_a_frame_without_history_is_a_runs_first() -> None:
    assert History.of_frame({}) == NO_HISTORY == History.of_frame(NO_HISTORY.frame())
