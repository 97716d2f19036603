"""Choose and make a node's sampling engine, from the current settings and base model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echo_node.backends.gpu_cage import GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.engine.choosing import EngineChooser
from echo_node.engine.speeds import SpeedBook
from echo_node.engine.supervisor import (
    Deliver,
    EngineFiles,
    EngineParts,
    EngineSupervisor,
    chosen,
    limits_of,
    settings_of,
)
from echo_node.engine.widths import Widths
from echo_node.host import hardware
from echo_node.host.artefact_files import content_here
from echo_node.host.hardware import Hardware
from echo_node.host.paths import NodePaths


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMaker:
    """Maker of engines. It reads changeable values at each call."""

    paths: NodePaths
    config: Callable[[], NodeConfig]
    """Return the settings in force."""
    run_id: Callable[[], str | None]
    """Return the run whose base model is used; None = unknown."""

    def look(self) -> tuple[Hardware, BackendChoice]:
        """Return the hardware and the best engine for it. Blocks. Raises BackendError if no engine is usable."""
        found, config, run_id = hardware.detect(), self.config(), self.run_id()
        content = None if run_id is None else content_here(self.paths.base(run_id))
        book = SpeedBook(self.paths.speeds)
        return found, chosen(book, found, content, settings_of(config), config.wanted_backend)

    def make(self, files: EngineFiles, chooser: EngineChooser, deliver: Deliver) -> EngineSupervisor:
        """Make the engine that the chooser has chosen; it reports through `deliver`."""
        config = self.config()
        parts = EngineParts(
            chooser=chooser,
            widths=Widths(self.paths.widths),
            speeds=SpeedBook(self.paths.speeds),
            settings=settings_of(config),
            limits=limits_of(config, chooser.hardware),
            priority=config.manners.priority,
            bench_seconds=config.bench_seconds,
            cage=config.cage,
            cages=GpuCages(self.paths.gpu_cages),
            deliver=deliver,
        )
        return EngineSupervisor(parts, files)
