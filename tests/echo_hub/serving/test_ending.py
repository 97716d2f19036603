from __future__ import annotations

import pytest

from echo_hub.serving.ending import RunEnding
from echo_shared.messages import RefusalCode


@pytest.mark.parametrize("published_first", [True, False])
def test_a_run_is_over_once_its_last_version_is_published_and_evaluated(published_first: bool) -> None:
    ending = RunEnding(last_version=4, evaluated={0, 2})
    steps = [ending.published, lambda: ending.evaluated(4)]
    for step in steps if published_first else reversed(steps):
        assert not ending.finished.is_set() and ending.farewell()[0] is RefusalCode.SHUTTING_DOWN
        step()
    assert ending.finished.is_set() and ending.farewell()[0] is RefusalCode.FINISHED


def test_another_versions_accuracy_ends_nothing() -> None:
    ending = RunEnding(last_version=4, evaluated=())
    ending.published()
    ending.evaluated(3)
    assert ending.last_is_published and not ending.finished.is_set()


def test_evaluations_from_before_a_restart_count() -> None:
    ending = RunEnding(last_version=4, evaluated={4})
    assert not ending.finished.is_set()
    ending.published()
    assert ending.finished.is_set()
