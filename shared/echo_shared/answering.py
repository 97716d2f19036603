"""The program of a process that computes what it is asked: it opens what it needs for that, says that it is ready, and
answers one request after the other until its parent is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from echo_shared.child import Frame, ParentPipe
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)


def serve(pipe: ParentPipe, opened: Callable[[Frame], Callable[[Frame], Iterable[Frame]]]) -> int:
    """The exit status. `opened`: given the opening frame, what gives a request's answers, each sent as soon as it is
    there; it raises EchoError when nothing can be answered."""
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
