from __future__ import annotations

import threading

import pytest

from echo_hub.learner.writer import CheckpointWriter


def test_a_write_runs_concurrently_with_other_work() -> None:
    writer, may_end, threads = CheckpointWriter(), threading.Event(), []

    def write() -> None:
        assert may_end.wait(60)
        threads.append(threading.current_thread())

    writer.wait()
    writer.start(write)
    assert threads == []
    may_end.set()
    writer.wait()
    writer.start(write)
    writer.wait()
    assert len(threads) == 2 and threading.current_thread() not in threads


def test_a_writes_error_is_raised_once() -> None:
    writer = CheckpointWriter()
    writer.start(lambda: [][0])
    with pytest.raises(IndexError):
        writer.wait()
    writer.wait()
