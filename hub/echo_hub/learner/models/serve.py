"""The process of tenants' models: `python -m echo_hub.learner.models.serve`, controlled by
`echo_hub.learner.models.process`.

The process holds its own copy of the base model, so a failure here does not touch the run's training. It answers a
failed request with a Refusal, LearnerError or StorageError. Any other failure ends the process, and the hub starts a
new process.
"""

from __future__ import annotations

import logging
import os
import sys

from echo_hub.learner.frames import failure, pack_error
from echo_hub.learner.models.worker import ModelWorker
from echo_hub.learner.settings import LearnerSettings
from echo_shared.errors import EchoError
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.process.heartbeat import Heartbeat


def serve(pipe: ParentPipe) -> int:
    """Answer commands until the parent is gone. Return the exit status."""
    opening = pipe.receive()
    if opening is None:
        return 0
    with Heartbeat(pipe, opening["beat_s"]) as heartbeat:
        try:
            worker = ModelWorker.open(LearnerSettings.model_validate(opening["settings"]), pipe)
            worker.policy.computed = heartbeat.step
            known = {"vocab_size": worker.policy.vocab_size, "context_tokens": worker.context_tokens}
            pipe.send({"call": 0, "kind": "result", **known})
            _answer_all(pipe, worker, heartbeat)
        except BrokenPipeError:
            return 0
        except EchoError as error:
            pipe.send({"call": 0, "kind": "error", **pack_error(error)})
            return 1
        except Exception as error:
            logging.exception("the process of tenants' models failed")
            pipe.send({"call": 0, **failure(error)})
            return 1
    return 0


def _answer_all(pipe: ParentPipe, worker: ModelWorker, heartbeat: Heartbeat) -> None:
    while not pipe.closed:
        frame: Frame | None = pipe.poll() if worker.has_work else pipe.receive()
        while frame is not None:
            worker.take(frame)
            frame = pipe.poll()
        if worker.has_work:
            with heartbeat.at_work():
                worker.work()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return serve(ParentPipe())


if __name__ == "__main__":
    sys.exit(main())
