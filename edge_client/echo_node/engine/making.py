"""Creates a node's sampling engines, from the current settings and the current base model."""

from __future__ import annotations

import asyncio
import os

from echo_node.backends.gpu_cage import GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.core.events import Incoming
from echo_node.engine.choosing import PROBE_S, EngineChoosers
from echo_node.engine.fitting import chosen, limits_of, settings_of
from echo_node.engine.on_devices import CommonBackend, named_devices, seen_by
from echo_node.engine.speeds import SpeedBook
from echo_node.engine.supervisor import EngineFiles, EngineParts, EngineSupervisor
from echo_node.engine.widths import Widths
from echo_node.host import devices, hardware
from echo_node.host.artefact_files import content_here
from echo_node.host.base_forms import CONVERTING
from echo_node.host.hardware import Hardware
from echo_node.host.paths import NodePaths


class EngineMaker:
    """Creates engines of the kind that `EngineChoosers` has chosen. The engines report to `inbox`."""

    def __init__(
        self, paths: NodePaths, config: NodeConfig, inbox: asyncio.Queue[Incoming], *, probe_s: float = PROBE_S
    ) -> None:
        self.config = config
        """Settings in force."""
        self.run_id: str | None = None
        """Run whose base model the engines use; None = unknown."""
        self.changed = asyncio.Event()
        """Set after each change of the chosen engine."""
        self.chooser = EngineChoosers(self, changed=self.changed, probe_s=probe_s)
        self._paths = paths
        self._inbox = inbox
        self._turn = asyncio.Lock()
        self._common = CommonBackend()

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices with an engine each; "" = the device that the node has chosen itself."""
        return tuple(self.chooser.by_device)

    @property
    def reads_gguf(self) -> bool:
        """True if the engines can use a base model that is a GGUF file: they run llama.cpp, and the settings name no
        precision, which is that of the file.
        """
        return self.config.precision == "auto" and self.chooser.has_decided and self.chooser.choice.name == CONVERTING

    def find_devices(self) -> tuple[str, ...]:
        """Return the names of the node's devices, as `LooksForEngines` requires."""
        return named_devices(self.config.devices, hardware.detect()) or ("",)

    def look(self, name: str = "") -> tuple[Hardware, BackendChoice]:
        """Return the hardware and its best engine; with `name`, the engine for this device. Blocks the calling thread.
        Raises BackendError if no engine is usable.
        """
        found, config, run_id = hardware.detect(), self.config, self.run_id
        content = None if run_id is None else content_here(self._paths.base(run_id))
        book, settings = SpeedBook(self._paths.speeds), settings_of(config, engines=len(self.devices))
        if not name:
            return found, chosen(book, found, content, settings, config.wanted_backend)
        device = devices.find(name, found, os.environ)
        backend = self._common.find(book, found, content, settings, config.wanted_backend, self.devices)
        seen = seen_by(device, found)
        return seen, chosen(book, seen, content, settings, backend, on=device)

    def renew(self) -> None:
        """Choose the engines again, because settings have changed."""
        self._common = CommonBackend()
        self.chooser.renew()

    def make(self, files: EngineFiles, device: str = "") -> EngineSupervisor:
        config, paths, chooser = self.config, self._paths, self.chooser.by_device[device]
        parts = EngineParts(
            device=device,
            chooser=chooser,
            widths=Widths(paths.widths),
            speeds=SpeedBook(paths.speeds),
            settings=settings_of(config, engines=len(self.devices)),
            limits=limits_of(config, self.chooser.hardware, engines=len(self.devices)),
            priority=config.manners.priority,
            bench_seconds=config.bench_seconds,
            cage=config.cage,
            cages=GpuCages(paths.gpu_cages),
            inbox=self._inbox,
            turn=self._turn,
        )
        return EngineSupervisor(parts, files)
