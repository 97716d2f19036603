"""Chooses the engines of a node whose owner has chosen the devices: one kind of engine for all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from echo_node.backends import registry
from echo_node.backends.base import EngineSettings
from echo_node.engine.fitting import measured
from echo_node.engine.speeds import SpeedBook
from echo_node.host import devices
from echo_node.host.devices import ALL, Device
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError


def named_devices(names: Sequence[str], hardware: Hardware) -> tuple[str, ...]:
    """Return the names of the devices in the setting `devices`; empty = the node chooses its device itself. May block
    the calling thread for seconds. Raises BackendError if the setting is `all` and there is no GPU.
    """
    vulkan = registry.vulkan_devices() if ALL in names and not hardware.cuda_gpus else 0
    return devices.names_here(names, hardware, vulkan, os.environ)


def seen_by(device: Device, hardware: Hardware) -> Hardware:
    """Return the hardware that an engine on this device sees."""
    if device.gpu is not None:
        return hardware.only([device.gpu])
    return hardware.only([]) if device.api == "cpu" else hardware


def check_devices(names: Sequence[str], hardware: Hardware, wanted: str) -> None:
    """Raise BackendError for a missing device, and for devices without a common backend. Blocks the calling thread for
    seconds.
    """
    found = {name: devices.find(name, hardware, os.environ) for name in named_devices(names, hardware)}
    registry.common_backend({name: (one, seen_by(one, hardware)) for name, one in found.items()}, wanted, {})


class CommonBackend:
    """The kind of engine that all devices use. The first result is kept, so that a device that returns gets the same
    kind.
    """

    def __init__(self) -> None:
        self._name = ""

    def find(
        self,
        book: SpeedBook,
        hardware: Hardware,
        content: str | None,
        settings: EngineSettings,
        wanted: str,
        names: Sequence[str],
    ) -> str:
        """Return the common backend of the present devices among `names`. `content`: id of the base model's content,
        None = unknown. Blocks the calling thread. Raises BackendError if no backend suits all of them.
        """
        if not self._name:
            here: dict[str, tuple[Device, Hardware]] = {}
            for name in names:
                with suppress(BackendError):  # Skip a missing device here: its own engine reports it.
                    device = devices.find(name, hardware, os.environ)
                    here[name] = device, seen_by(device, hardware)
            if not here:
                raise BackendError("None of the node's devices is here.", got=", ".join(names), code=devices.NOT_HERE)
            rates = {
                name: {key: one.best for key, one in measured(book, seen, content, settings, on=device).items()}
                for name, (device, seen) in here.items()
            }
            self._name = registry.common_backend(here, wanted, rates)
        return self._name
