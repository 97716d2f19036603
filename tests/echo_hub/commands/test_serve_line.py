from __future__ import annotations

import asyncio
import io
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
from rich.console import Console

from echo_hub.commands import serve_line as serve_line_module
from echo_hub.commands.serve_line import DONE, ServeLine, line_of
from echo_hub.dashboard.model import RunState, RunView
from echo_hub.dashboard.source import PagesSource
from echo_shared.errors import StorageError
from echo_shared.records.health import Health, HubState

VIEW = RunView(
    as_of=1.0,
    run_id="r",
    name="spring",
    mode="async",
    task="arithmetic",
    base_model="builtin:tiny",
    join_command="echo-node join http://hub",
    state=RunState.RUNNING,
    state_detail="training",
    started_at=1.0,
    steps_total=1_200,
    trained_step=17,
    group_size=8,
    max_staleness=2,
    nodes_connected=3,
    rollouts_per_s=12.34,
)
FINISHED = replace(VIEW, health=Health(state=HubState.FINISHED), trained_step=1_200, nodes_useful=2)


class Run:
    """A run with scripted views. Each read returns the next view, and the last view repeats. `done` is set when all
    views were read."""

    def __init__(self, *views: RunView | Exception) -> None:
        self.views = list(views)
        self.done = asyncio.Event()

    async def run_view(self) -> RunView:
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if len(self.views) == 1 and view is self.views[0]:
            self.done.set()
        if isinstance(view, Exception):
            raise view
        return view


async def shown(run: Run, monkeypatch: pytest.MonkeyPatch, *, terminal: bool, out: Any = None) -> str:
    monkeypatch.setattr(serve_line_module, "REFRESH_S", 0.0)
    screen, plain = io.StringIO(), io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200, color_system=None)
    task = asyncio.create_task(ServeLine(cast(PagesSource, run), terminal=console, out=out or plain).run())
    async with asyncio.timeout(60):
        await run.done.wait()
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return screen.getvalue() if terminal else plain.getvalue()


def test_a_line_shows_the_runs_state() -> None:
    assert line_of(VIEW) == "ready · step 17 of 1,200 · training · 3 nodes · 12.3 rollouts/s"
    alone = replace(VIEW, nodes_connected=1, health=Health(state=HubState.DEGRADED, reasons=("It died.", "And more.")))
    assert line_of(alone) == "degraded · step 17 of 1,200 · It died. · 1 node · 12.3 rollouts/s"
    assert line_of(replace(FINISHED, rollouts_per_s=0.0)) == "finished · step 1,200 of 1,200 · 3 nodes"
    assert line_of(replace(FINISHED, mode="colocated")) == "finished · step 1,200 of 1,200 · 12.3 rollouts/s"


async def test_without_a_terminal_each_state_and_the_end_print_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = replace(VIEW, health=Health(state=HubState.LIVE, reasons=("No node is connected.",)))
    failing = StorageError("The hub's database cannot be read.")
    text = await shown(
        Run(live, replace(live, trained_step=18), VIEW, failing, replace(VIEW, trained_step=18), FINISHED, FINISHED),
        monkeypatch,
        terminal=False,
    )
    first, second, last = text.splitlines()
    assert first.startswith("live · ") and second.startswith("ready · step 17")
    assert last == f"The run is finished: 1200 steps, 0 rollouts of 2 nodes. {DONE}"


async def test_a_terminal_has_one_line_and_the_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = await shown(Run(VIEW, FINISHED, FINISHED, FINISHED, FINISHED), monkeypatch, terminal=True)
    assert "ready · step 17 of 1,200" in text and text.count("The run is finished: 1200 steps") == 1


async def test_the_output_may_be_closed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    assert await shown(Run(VIEW, FINISHED, FINISHED), monkeypatch, terminal=False, out=Gone()) == ""
