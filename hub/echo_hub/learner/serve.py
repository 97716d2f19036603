"""The learner's process: `python -m echo_hub.learner.serve`, controlled by `echo_hub.learner.process`.

`LearnerWorker` executes commands one at a time, in order. If it refuses a command (LearnerError), nothing changes. Any
other failure ends the process; the next process starts from the newest checkpoint.

With several processes (`echo_hub.learner.launch`), rank 0 talks to the hub, refuses invalid commands and owns the run
directory. Every rank executes the accepted commands.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from torch import distributed

from echo_hub.learner import frames
from echo_hub.learner.launch import end_with
from echo_hub.learner.ranks import ALONE, TrainingRanks
from echo_hub.learner.worker import LearnerWorker
from echo_shared.errors import EchoError, LearnerError
from echo_shared.files.full_disk import Room
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.process.heartbeat import Heartbeat

log = logging.getLogger(__name__)

TICK_S: Final = 60.0
"""Interval, in seconds, of messages to ranks that wait for a command. It is well below their limit, `ranks.SILENCE`."""


def serve(pipe: ParentPipe, ranks: TrainingRanks = ALONE) -> int:
    """Run rank 0: answer commands until the parent is gone. Return the exit status."""
    opening = _next_command(pipe, ranks)
    if opening is not None:
        assert opening["command"] == "open", "the parent opens first"
        with Heartbeat(pipe, opening["beat_s"]) as heartbeat:
            status = _answer_all(pipe, ranks, heartbeat, opening)
        if status:
            return status
    ranks.tell({"command": "end"})
    ranks.leave()
    return 0


def _answer_all(pipe: ParentPipe, ranks: TrainingRanks, heartbeat: Heartbeat, opening: Frame) -> int:
    worker: LearnerWorker | None = None
    frame: Frame | None = opening
    while frame is not None:
        if worker is not None and worker.failed:
            return 1
        answers = _CallAnswers(pipe, frame["call"])
        try:
            if worker is None:
                room = Room(tell=partial(_tell_disk, pipe))
                worker = LearnerWorker.open(ranks.tell(frame), ranks, heartbeat, room)
                told = frames.pack_told(worker.told)
                answers.send({"kind": "result", "policy_version": worker.policy_version, "told": told})
            elif frame["command"] == "hold":
                worker.hold(frame["groups"])
            elif frame["command"] == "confirm":
                worker.confirm(frame["step"])
            else:
                with heartbeat.at_work():
                    worker.handle(ranks.tell(worker.admitted(frame)), answers)
        except BrokenPipeError:
            break
        except LearnerError as error:
            answers.send({"kind": "error", **frames.pack_error(error)})
        except Exception as error:
            logging.exception("command %s failed", frame["command"])
            # With several ranks, an error that is no EchoError probably means that another rank died. Do not report it,
            # because a reported error ends the run; the hub restarts all ranks instead.
            if isinstance(error, EchoError) or ranks.count == 1:
                answers.send(frames.failure(error))
            return 1
        frame = _next_command(pipe, ranks)
    if worker is not None:
        with suppress(BrokenPipeError):
            worker.close()
    return 0


class _CallAnswers:
    """Sends the answers to one call of the hub."""

    def __init__(self, pipe: ParentPipe, call: int) -> None:
        self._pipe = pipe
        self._call = call

    def send(self, answer: Frame) -> None:
        self._pipe.send({"call": self._call, **answer})


def _tell_disk(pipe: ParentPipe, said: str) -> None:
    if said:
        log.warning("the disk is full: %s", said)
    else:
        log.warning("the disk has free space again")
    pipe.send({"call": 0, "kind": "disk", "full": said})


def _next_command(pipe: ParentPipe, ranks: TrainingRanks) -> Frame | None:
    """Return the hub's next command, however long it takes; None if the hub has ended. Meanwhile, other ranks get a
    message every `TICK_S`.
    """
    while (frame := pipe.receive(timeout_s=TICK_S)) is None and not pipe.ended:
        ranks.tell({"command": "wait"})
    return None if pipe.closed else frame


def follow(ranks: TrainingRanks) -> int:
    """Run a rank above 0: execute the commands that rank 0 sends. Return the exit status."""
    worker: LearnerWorker | None = None
    while (frame := ranks.tell())["command"] != "end":
        if frame["command"] == "open":
            try:
                worker = LearnerWorker.open(frame, ranks)
            except LearnerError as error:
                log.warning("rank 0 tells the hub: %s", error)
        elif frame["command"] != "wait":
            assert worker is not None, "rank 0 opens first"
            worker.handle(frame, _Unheard())
    ranks.leave()
    return 0


class _Unheard:
    """Discards the answers of a rank above 0: only rank 0 answers the hub."""

    def send(self, answer: Frame) -> None:
        pass


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The hub sets CUBLAS_WORKSPACE_CONFIG for its own child; on other hosts it is set here. Without the variable, CUDA
    # matrix products are not deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not distributed.is_torchelastic_launched():
        return serve(ParentPipe())
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--base", type=Path)
    given = parser.parse_args()
    end_with(given.launcher)
    # Redirect before anything is printed: standard input and output carry the hub's protocol, which only rank 0 uses.
    pipe = ParentPipe() if os.environ["RANK"] == "0" else None
    if pipe is None:
        os.dup2(2, 1)
    ranks = TrainingRanks.join(base_dir=given.base)
    return follow(ranks) if pipe is None else serve(pipe, ranks)


if __name__ == "__main__":
    sys.exit(main())
