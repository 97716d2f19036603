"""Chooses engine and device before each start: devices may disappear, for example during sleep, and return.

A node that chooses its device itself has one chooser. A node with chosen devices has one for each; all of them choose
the same kind of engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from echo_node.backends.registry import BackendChoice
from echo_node.core.clocks import in_words
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError

log = logging.getLogger(__name__)

PROBE_S: Final = 60.0

Look = Callable[[], tuple[Hardware, BackendChoice]]
"""Function that detects the hardware and chooses an engine. It blocks, and raises BackendError if no engine is
usable.
"""


class LooksForEngines(Protocol):
    """The detection of devices and engines. All methods block the calling thread."""

    def find_devices(self) -> tuple[str, ...]:
        """Return the names of the node's devices. Raises BackendError if there is none."""

    def look(self, name: str) -> tuple[Hardware, BackendChoice]:
        """Return the hardware that an engine on this device sees, and its choice. Raises BackendError if no engine is
        usable.
        """


class EngineChooser:
    """The node's current choice of an engine. Call `decide` first, which sets `hardware` and `choice`.

    The first choice is preferred: after a fallback to another device, the chooser returns to it.
    """

    def __init__(self, look: Look, *, changed: asyncio.Event, probe_s: float = PROBE_S) -> None:
        """`changed` is set after each change of the choice. `probe_s`: seconds between two detections of the hardware
        during a fallback.
        """
        self.hardware: Hardware
        self.choice: BackendChoice
        self._look = look
        self._changed = changed
        self._probe_s = probe_s
        self._first: BackendChoice | None = None
        self._is_renewed = False
        self._again = asyncio.Event()

    @property
    def has_decided(self) -> bool:
        """True once `decide` has found an engine."""
        return self._first is not None

    @property
    def is_fallback(self) -> bool:
        return self._first is not None and not _same(self.choice, self._first)

    def renew(self) -> None:
        """Let the next choice count as the preferred one, because settings have changed."""
        self._is_renewed = True

    @property
    def trouble(self) -> Trouble | None:
        """Trouble to report while the preferred device is gone, or while a GPU is unused; else None."""
        first = self._first
        if first is None:
            return None
        if first.device == "cpu" or self.choice.device == first.device:
            unused = self.choice.unused_gpu
            return Trouble(TroubleCode.GPU_UNUSED, unused) if unused else None
        return Trouble(
            TroubleCode.DEVICE_GONE,
            f"The device of {first.name} on {first.device} is gone: the node uses {self.choice.name} on "
            f"{self.choice.device}, and looks for the device every {in_words(self._probe_s)}. If it stays away, "
            "restart the computer.",
        )

    def look_again(self) -> None:
        """Make `until_another` detect the hardware at once, because the machine has woken up."""
        self._again.set()

    async def decide(self) -> BackendChoice:
        """Choose an engine for the current hardware. Raises BackendError."""
        before = None if self._first is None else self.choice
        self.hardware, self.choice = await asyncio.to_thread(self._look)
        if before is None or self._is_renewed:
            self._first, self._is_renewed = self.choice, False
        if before is None:
            log.info("Engine: %s on %s (%s).", self.choice.name, self.choice.label, self.choice.reason)
            if self.choice.unused_gpu:
                log.warning("%s", self.choice.unused_gpu)
        elif not _same(before, self.choice):
            log.warning(
                "Engine: %s on %s (%s), no longer %s on %s.",
                *(self.choice.name, self.choice.label, self.choice.reason),
                *(before.name, before.label),
            )
            self._changed.set()
        return self.choice

    async def until_another(self) -> None:
        """Detect the hardware repeatedly, until `decide` would choose another engine or device."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._probe_s):
                    await self._again.wait()
            self._again.clear()
            try:
                _, found = await asyncio.to_thread(self._look)
            except BackendError as error:
                log.warning("No engine is usable at this moment: %s", error)
                continue
            if not _same(found, self.choice):
                return


class EngineChoosers:
    """A node's engine choosers, one per device. Call `decide` first, which makes them."""

    def __init__(self, machine: LooksForEngines, *, changed: asyncio.Event, probe_s: float = PROBE_S) -> None:
        """For `changed` and `probe_s` see `EngineChooser`."""
        self.by_device: dict[str, EngineChooser] = {}
        """Chooser by name of the device; "" = the device that the node itself has chosen. `decide` fills this map."""
        self._machine = machine
        self._changed = changed
        self._probe_s = probe_s

    @property
    def choice(self) -> BackendChoice:
        """Engine and device chosen for the first of the node's devices that the machine has now."""
        return self._decided[0].choice

    @property
    def has_decided(self) -> bool:
        """True once an engine was found for one of the devices."""
        return bool(self._decided)

    @property
    def hardware(self) -> Hardware:
        """The hardware with the GPUs that the engines use."""
        first, *others = (chooser.hardware for chooser in self._decided)
        return first.joined(others)

    @property
    def trouble(self) -> Trouble | None:
        """Trouble to report for the first device that has one, as `EngineChooser.trouble` says."""
        return next((found for chooser in self._decided if (found := chooser.trouble) is not None), None)

    @property
    def label(self) -> str:
        """Names of all devices that the node uses, for its user."""
        return ", ".join(name or chooser.choice.label for name, chooser in self.by_device.items())

    @property
    def _decided(self) -> list[EngineChooser]:
        return [chooser for chooser in self.by_device.values() if chooser.has_decided]

    def renew(self) -> None:
        for chooser in self.by_device.values():
            chooser.renew()

    def look_again(self) -> None:
        for chooser in self.by_device.values():
            chooser.look_again()

    async def decide(self) -> None:
        """Find the devices, and choose an engine for each. Raises BackendError if none of them has one."""
        if not self.by_device:
            names = await asyncio.to_thread(self._machine.find_devices)
            self.by_device = {
                name: EngineChooser(partial(self._machine.look, name), changed=self._changed, probe_s=self._probe_s)
                for name in names
            }
        failures = []
        for chooser in self.by_device.values():
            try:
                await chooser.decide()
            except BackendError as error:
                log.warning("%s", error)
                failures.append(error)
        if len(failures) == len(self.by_device):
            raise failures[0]


def _same(one: BackendChoice, other: BackendChoice) -> bool:
    return (one.name, one.device) == (other.name, other.device)
