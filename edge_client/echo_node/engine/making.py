"""Creates a node's sampling engines, from the current settings and the current base model."""

from __future__ import annotations

import asyncio

from echo_node.backends.gpu_cage import GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.core.events import Incoming
from echo_node.engine.choosing import PROBE_S, EngineChooser
from echo_node.engine.speeds import SpeedBook
from echo_node.engine.supervisor import EngineFiles, EngineParts, EngineSupervisor, chosen, limits_of, settings_of
from echo_node.engine.widths import Widths
from echo_node.host import hardware
from echo_node.host.artefact_files import content_here
from echo_node.host.hardware import Hardware
from echo_node.host.paths import NodePaths


class EngineMaker:
    """Creates engines of the kind that its chooser has chosen. The engines report to `inbox`."""

    def __init__(
        self, paths: NodePaths, config: NodeConfig, inbox: asyncio.Queue[Incoming], *, probe_s: float = PROBE_S
    ) -> None:
        self.config = config
        """Settings in force."""
        self.run_id: str | None = None
        """Run whose base model the engines use; None = unknown."""
        self.changed = asyncio.Event()
        """Set after each change of the chosen engine."""
        self.chooser = EngineChooser(self.look, changed=self.changed, probe_s=probe_s)
        self._paths = paths
        self._inbox = inbox

    def look(self) -> tuple[Hardware, BackendChoice]:
        """Return the hardware and the best engine for it. Blocks the calling thread. Raises BackendError if no engine
        is usable.
        """
        found, config, run_id = hardware.detect(), self.config, self.run_id
        content = None if run_id is None else content_here(self._paths.base(run_id))
        book = SpeedBook(self._paths.speeds)
        return found, chosen(book, found, content, settings_of(config), config.wanted_backend)

    def make(self, files: EngineFiles) -> EngineSupervisor:
        config, paths = self.config, self._paths
        parts = EngineParts(
            chooser=self.chooser,
            widths=Widths(paths.widths),
            speeds=SpeedBook(paths.speeds),
            settings=settings_of(config),
            limits=limits_of(config, self.chooser.hardware),
            priority=config.manners.priority,
            bench_seconds=config.bench_seconds,
            cage=config.cage,
            cages=GpuCages(paths.gpu_cages),
            inbox=self._inbox,
        )
        return EngineSupervisor(parts, files)
