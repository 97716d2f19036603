"""Main loop of a worker process: open, report that it is ready, then answer requests until the parent is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from echo_shared.errors import EchoError
from echo_shared.process.child import Frame, ParentPipe

log = logging.getLogger(__name__)


def serve(pipe: ParentPipe, opened: Callable[[Frame], Callable[[Frame], Iterable[Frame]]]) -> int:
    """Run the worker's main loop and return the process's exit status.

    `opened` takes the opening frame and returns the request handler; it raises EchoError if the worker cannot start.
    The handler takes a request and yields its answers; each is sent as soon as it is yielded.
    """
    opening = pipe.receive()
    if opening is None:
        return 0
    try:
        answers = opened(opening)
    except EchoError as error:
        log.error("%s", error)
        pipe.send({"failed": str(error)})
        return 1
    pipe.send({"ready": True})
    while (request := pipe.receive()) is not None:
        for answer in answers(request):
            if pipe.closed:
                return 0
            pipe.send(answer)
    return 0
