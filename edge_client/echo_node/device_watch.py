"""Watches the single devices of a node: their sensors, and the owner's pauses of single devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from echo_node.core.device_manners import DeviceManners
from echo_node.core.manners import GpuFigures, Hold, MannersConfig, OwnerPause, SensorReading
from echo_node.engine.choosing import EngineChoosers
from echo_node.host.pause import DevicePausesFile
from echo_shared.errors import ConfigError


class DeviceWatch:
    """The holds (reasons to pause) of single devices. A node that chooses its device itself has none."""

    def __init__(self, chooser: EngineChoosers, settings: MannersConfig, file: DevicePausesFile) -> None:
        self.holds: Mapping[str, tuple[Hold, ...]] = {}
        """Current holds (reasons to pause) of single devices, by device; a device without holds is missing here."""
        self.figures: Mapping[str, GpuFigures] = {}
        """Newest sensor values by device; empty = the node chooses its device itself."""
        self._chooser = chooser
        self._manners = DeviceManners(settings)
        self._file = file
        self._pauses = file.load()
        self._is_unsaved = False
        """True if the owner's last command is not on disk."""

    def use(self, settings: MannersConfig) -> None:
        self._manners.use(settings)

    def look(self, reading: SensorReading, *, now: float, local: datetime) -> SensorReading:
        """Update `holds`. Return the reading without the values that concern single devices."""
        names = [name for name in self._chooser.by_device if name]
        if not names:
            return reading
        self.figures = {name: self._figures(name, reading) for name in names}
        found = {
            name: self._manners.holds(name, figures, pause=self._pauses.get(name), now=now, local=local)
            for name, figures in self.figures.items()
        }
        self.holds = {name: holds for name, holds in found.items() if holds}
        return replace(reading, others_gpu=None, gpu_celsius=None, gpu_watts=None)

    def _figures(self, name: str, reading: SensorReading) -> GpuFigures:
        """Return the sensor values of this device's GPU; if the GPU is unknown, the maxima over all GPUs. For the
        processor, return no values: its own values concern the whole node.
        """
        if name == "cpu":
            return GpuFigures()
        chooser = self._chooser.by_device[name]
        device = chooser.choice.on if chooser.has_decided else None
        own = None if device is None or device.gpu is None else reading.gpus.get(device.gpu.uuid)
        if own is not None:
            return own
        return GpuFigures(others=reading.others_gpu, celsius=reading.gpu_celsius, watts=reading.gpu_watts)

    def change(self, device: str, pause: OwnerPause | None) -> None:
        """Pause or resume one device. Raises ConfigError if the node has no such device, and StorageError if the disk
        fails; the pause then still takes effect.
        """
        names = [name for name in self._chooser.by_device if name]
        if device not in names:
            raise ConfigError(
                f"This node has no device {device}.",
                got=f"its devices are {', '.join(names)}" if names else "it has chosen its device itself",
                do="Pause the whole node: echo-node pause. Name devices: echo-node config set devices cuda:0 cuda:1",
            )
        others = {name: one for name, one in self._pauses.items() if name != device}
        self._pauses = others if pause is None else {**others, device: pause}
        self.save()

    def save(self) -> None:
        """Save the pauses. Raises StorageError; `save_again` retries."""
        self._is_unsaved = True
        self._file.save(self._pauses)
        self._is_unsaved = False

    def save_again(self) -> None:
        """Save the pauses if the last attempt failed. Raises StorageError."""
        if self._is_unsaved:
            self.save()
