from __future__ import annotations

import pytest

from echo_hub.driving.progress import RunProgress
from echo_shared.wire.messages import RefusalCode


@pytest.mark.parametrize("published_first", [True, False])
def test_a_run_is_over_once_its_last_version_is_published_and_evaluated(published_first: bool) -> None:
    progress = RunProgress(last_version=4, evaluated={0, 2})
    steps = [progress.published, lambda: progress.evaluated(4)]
    for step in steps if published_first else reversed(steps):
        assert not progress.finished.is_set() and progress.farewell()[0] is RefusalCode.SHUTTING_DOWN
        step()
    assert progress.finished.is_set() and progress.farewell()[0] is RefusalCode.FINISHED


def test_another_versions_accuracy_ends_nothing() -> None:
    progress = RunProgress(last_version=4, evaluated=())
    progress.published()
    progress.evaluated(3)
    assert progress.last_is_published and not progress.finished.is_set()


def test_what_was_evaluated_before_a_restart_counts() -> None:
    progress = RunProgress(last_version=4, evaluated={4})
    assert not progress.finished.is_set()
    progress.published()
    assert progress.finished.is_set()
