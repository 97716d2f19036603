"""The status display of `echo-hub serve`: a live line on a terminal, otherwise a new line every `PLAIN_S`.

Errors of the output are ignored, so that the hub keeps running.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from echo_hub.dashboard.model import RunView
from echo_hub.dashboard.source import PagesSource
from echo_hub.oversight.operating import summary
from echo_shared.errors import StorageError
from echo_shared.records.health import HubState

REFRESH_S: Final = 2.0
PLAIN_S: Final = 300.0
"""Seconds between two lines if the output is no terminal. A change of the run's state is printed at once."""
DONE: Final = "The pages stay available until you press Ctrl-C."


def line_of(view: RunView) -> str:
    """Return the status in one line. The most important part comes first, because a narrow terminal cuts off the
    end."""
    parts = [view.health.state.value]
    if view.trains:
        parts.append(f"step {view.trained_step:,} of {view.steps_total:,}")
    why = view.health.reasons[0] if view.health.reasons else view.state_detail
    if why and view.health.state is not HubState.FINISHED:
        parts.append(why)
    if view.mode != "colocated":
        parts.append("1 node" if view.nodes_connected == 1 else f"{view.nodes_connected:,} nodes")
    if view.rollouts_per_s >= 0.05:
        parts.append(f"{view.rollouts_per_s:,.1f} rollouts/s")
    if view.mean_reward is not None:
        parts.append(f"reward {view.mean_reward:.3g}")
    if view.accuracy_after is not None:
        parts.append(f"held-out accuracy {view.accuracy_after:.1%}")
    return " · ".join(parts)


class ServeLine:
    """Shows the run's status. `terminal` is the console that log lines use. If it is no terminal, lines are written to
    the file `out`.
    """

    def __init__(self, pages: PagesSource, *, terminal: Console, out: TextIO) -> None:
        self._pages = pages
        self._terminal = terminal
        self._out = out

    async def run(self) -> None:
        if self._terminal.is_terminal:
            await self._show_live()
        else:
            await self._print_plain()

    async def _show_live(self) -> None:
        finished = False
        with Live(console=self._terminal, auto_refresh=False, transient=True) as live:
            while True:
                if (view := await self._view()) is not None:
                    if view.health.state is HubState.FINISHED and not finished:
                        finished = True
                        self._terminal.print(Text(f"{summary(view)} {DONE}"), soft_wrap=True)
                    live.update(Text(line_of(view), no_wrap=True, overflow="ellipsis"), refresh=True)
                await asyncio.sleep(REFRESH_S)

    async def _print_plain(self) -> None:
        shown, state, waited_s = "", None, PLAIN_S
        while True:
            view = await self._view()
            line = "" if view is None else line_of(view)
            if view is not None and line != shown and (view.health.state is not state or waited_s >= PLAIN_S):
                is_done = view.health.state is HubState.FINISHED and state is not HubState.FINISHED
                self._say(f"{summary(view)} {DONE}" if is_done else line)
                shown, state, waited_s = line, view.health.state, 0.0
            await asyncio.sleep(REFRESH_S)
            waited_s += REFRESH_S

    async def _view(self) -> RunView | None:
        """Return the run's view; None if the database cannot be read now. Another part of the hub logs this failure."""
        with suppress(StorageError):
            return await self._pages.run_view()
        return None

    def _say(self, line: str) -> None:
        with suppress(OSError, ValueError):  # The reader of the output may have ended.
            print(line, file=self._out, flush=True)
