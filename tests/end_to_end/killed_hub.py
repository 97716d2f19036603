"""A hub that kills itself with SIGKILL at a chosen moment of an episode's turn: `python killed_hub.py MOMENT N ...`.

    after_step     the session has answered the Nth turn; its answer is not committed
    after_commit   the Nth answer is committed together with the next turn's lease; the lease is not sent

The other arguments are those of `echo-hub`. Apart from the kill, this hub behaves like any other.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from echo_hub.core.accounting.effects import Record, ScoreRecorded
from echo_hub.driving.driver import Driver
from echo_hub.main import app
from echo_hub.sessions.host import SessionHost
from echo_hub.sessions.turns import NextTurn


def counted(number: int) -> Callable[[int], None]:
    """Return a function that kills this process once it has counted to `number`."""
    left = [number]

    def count(more: int) -> None:
        left[0] -= more
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def kill_after_step(count: Callable[[int], None]) -> None:
    respond = SessionHost.respond

    async def responding(host: SessionHost, *args: Any, **kwargs: Any) -> Any:
        answer = await respond(host, *args, **kwargs)
        count(isinstance(answer, NextTurn))
        return answer

    vars_of(SessionHost, respond=responding)


def kill_after_commit(count: Callable[[int], None]) -> None:
    commit = Driver._commit

    async def committing(driver: Driver, records: Sequence[Record], *more: Any) -> Any:
        found = await commit(driver, records, *more)
        count(sum(isinstance(one, ScoreRecorded) and one.observation_ids is not None for one in records))
        return found

    vars_of(Driver, _commit=committing)


def vars_of(kind: type, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(kind, name, method)


if __name__ == "__main__":
    moment, number, *rest = sys.argv[1:]
    {"after_step": kill_after_step, "after_commit": kill_after_commit}[moment](counted(int(number)))
    sys.argv[1:] = rest
    app()
