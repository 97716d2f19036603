"""Chooses a node's sampling engine and makes it, by the settings and the base model of that moment."""

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
from echo_node.host.paths import Paths


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMaker:
    """Asks anew each time for what may change."""

    paths: Paths
    config: Callable[[], NodeConfig]
    """The settings in force."""
    run_id: Callable[[], str | None]
    """The run whose base model it is for; None = none is known."""

    def look(self) -> tuple[Hardware, BackendChoice]:
        """This machine, and what suits it best. Blocks. Raises BackendError when there is nothing to choose."""
        found, config, run_id = hardware.detect(), self.config(), self.run_id()
        content = None if run_id is None else content_here(self.paths.base(run_id))
        book = SpeedBook(self.paths.speeds)
        return found, chosen(book, found, content, settings_of(config), config.wanted_backend)

    def make(self, files: EngineFiles, chooser: EngineChooser, deliver: Deliver) -> EngineSupervisor:
        """An engine that works as `chooser` says, and tells through `deliver`."""
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
