"""Chooses a node's sampling engine and makes it, by the settings and the base model of that moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echo_node.backends import registry
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.engine.choosing import EngineChooser
from echo_node.engine.speeds import SpeedBook
from echo_node.engine.supervisor import (
    Deliver,
    EngineFiles,
    EngineParts,
    EngineSupervisor,
    limits_of,
    measured_rates,
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
        found = hardware.detect()
        return found, registry.choose(found, self.config().wanted_backend, self._measured(found))

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
            deliver=deliver,
        )
        return EngineSupervisor(parts, files)

    def _measured(self, found: Hardware) -> dict[tuple[str, str], float]:
        """What engines were measured at on the run's base model, if that is here."""
        run_id = self.run_id()
        content = None if run_id is None else content_here(self.paths.base(run_id))
        if content is None:
            return {}
        return measured_rates(SpeedBook(self.paths.speeds), found, content, settings_of(self.config()))
