"""Commands that work until they are stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import typer

from echo_hub.net.turns import loop_factory
from echo_shared.errors import EchoError


def run_until_stopped(main: Coroutine[Any, Any, Any], *, stopped: str = "the run goes on where it stopped") -> Any:
    """Runs to the end, or to Ctrl-C or SIGTERM: both cancel, so that everything is closed in order; None then.
    `stopped`: what becomes of what was not done."""

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
        # Tasks fail together; a user wants the one error that has a text for them.
        raise _known(group) from group


def _known(error: BaseException) -> BaseException:
    """The first EchoError in a group, however deep; the group itself when there is none."""
    known = error.subgroup(EchoError) if isinstance(error, BaseExceptionGroup) else None
    while isinstance(known, BaseExceptionGroup):
        first = known.exceptions[0]
        if not isinstance(first, BaseExceptionGroup):
            return first
        known = first
    return error
