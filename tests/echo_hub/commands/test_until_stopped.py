from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from echo_hub.commands.until_stopped import run_until_stopped
from echo_shared.errors import LearnerError, StorageError


def test_a_result_is_handed_on() -> None:
    async def work() -> int:
        return 3

    assert run_until_stopped(work()) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_signal_cancels_the_work_and_prints_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    assert run_until_stopped(work(), stopped="others go on") is None
    assert closed and "Nothing is lost: others go on." in capsys.readouterr().err


def test_of_tasks_that_fail_together_the_user_sees_the_known_error() -> None:
    async def fail(*errors: Exception) -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("more", list(errors))])

    with pytest.raises(StorageError, match="full"):
        run_until_stopped(fail(RuntimeError("x"), StorageError("The disk is full."), LearnerError("y")))
    with pytest.raises(ExceptionGroup, match="tasks"):
        run_until_stopped(fail(RuntimeError("x")))
