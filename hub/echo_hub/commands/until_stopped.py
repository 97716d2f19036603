"""Run a command until it ends or is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import typer

from echo_hub.net.turns import loop_factory
from echo_shared.errors import EchoError


def run_until_stopped(main: Coroutine[Any, Any, Any], *, stopped: str = "the run resumes where it stopped") -> Any:
    """Run `main` to its end. If Ctrl-C or SIGTERM stops it, cancel it, so that everything closes in order, and return
    None.

    The text `stopped` is printed in that case. It tells the user what happens to the unfinished work.
    """

    async def until_signalled() -> Any:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        if sys.platform != "win32":
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            typer.echo(f"\nStopped. Nothing is lost: {stopped}.", err=True)
            return None

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(until_signalled())
    except BaseExceptionGroup as group:
        # Several tasks of the group may have failed. Show the user the EchoError among them, which has a text for
        # users.
        raise _known(group) from group


def _known(error: BaseException) -> BaseException:
    """Return the first EchoError nested in an exception group; the group itself if there is none."""
    known = error.subgroup(EchoError) if isinstance(error, BaseExceptionGroup) else None
    while isinstance(known, BaseExceptionGroup):
        first = known.exceptions[0]
        if not isinstance(first, BaseExceptionGroup):
            return first
        known = first
    return error
