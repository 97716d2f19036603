"""Engines in scripted processes (`odd_worker`), and the events that their supervisors report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from echo_node.backends.base import EngineSettings
from echo_node.backends.gpu_cage import GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.engine.choosing import EngineChooser
from echo_node.engine.speeds import SpeedBook
from echo_node.engine.supervisor import EngineFiles, EngineParts, EngineSupervisor
from echo_node.engine.widths import Widths
from echo_node.host import hardware
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError
from echo_shared.process.supervised import ChildLimits

PATIENCE_S = 60.0


def files_in(directory: Path) -> EngineFiles:
    return EngineFiles(
        base_dir=directory,
        base_content="base",
        policies_dir=directory,
        derived_dir=directory,
        log=directory / "log",
    )


class Engines:
    """Starts engines and collects their events. `choice` is the engine that the machine has; None: the machine has no
    engine.
    """

    def __init__(self, directory: Path, choice: BackendChoice | None) -> None:
        self.directory = directory
        self.choice = choice
        self.device = ""
        self.changed = asyncio.Event()
        self.chooser = EngineChooser(self._look, changed=self.changed, probe_s=0.01)
        self.book = SpeedBook(directory / "speeds.json")
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.turn = asyncio.Lock()
        self.engine: EngineSupervisor
        self._runs: list[asyncio.Task[None]] = []

    def _look(self) -> tuple[Hardware, BackendChoice]:
        if self.choice is None:
            raise BackendError("There is no engine.")
        return hardware.detect(), self.choice

    async def start(
        self, max_width: int = 0, *, width: int = 0, bench_seconds: float = 0.0, precision: str = "auto"
    ) -> Any:
        parts = EngineParts(
            chooser=self.chooser,
            widths=Widths(self.directory / "widths.json"),
            speeds=self.book,
            settings=EngineSettings(width=width, stream_s=0.01, precision=precision),
            limits=ChildLimits(memory_bytes=2**33),
            priority="normal",
            bench_seconds=bench_seconds,
            cage="auto",
            cages=GpuCages(self.directory / "gpu_cages.json"),
            inbox=self.events,
            device=self.device,
            turn=self.turn,
        )
        self.engine = EngineSupervisor(parts, files_in(self.directory))
        self._runs.append(asyncio.create_task(self.engine.run(0.0, max_width)))
        return await self.next()

    async def next(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.events.get()

    async def end(self) -> None:
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
