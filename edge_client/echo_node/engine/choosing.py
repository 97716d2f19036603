"""Chooses engine and device before each start: devices may disappear, for example during sleep, and return."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from echo_node.backends.registry import BackendChoice
from echo_node.core.clocks import in_words
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError

log = logging.getLogger(__name__)

PROBE_S: Final = 60.0

Look = Callable[[], tuple[Hardware, BackendChoice]]
"""Function that detects the hardware and chooses an engine. It blocks, and raises BackendError if no engine
is usable.
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
    def is_fallback(self) -> bool:
        return self._first is not None and not _same(self.choice, self._first)

    def renew(self) -> None:
        """Make the next choice the preferred one, because settings have changed."""
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
            log.info("Engine: %s on %s (%s).", self.choice.name, self.choice.device, self.choice.reason)
            if self.choice.unused_gpu:
                log.warning("%s", self.choice.unused_gpu)
        elif not _same(before, self.choice):
            log.warning(
                "Engine: %s on %s (%s), no longer %s on %s.",
                *(self.choice.name, self.choice.device, self.choice.reason),
                *(before.name, before.device),
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


def _same(one: BackendChoice, other: BackendChoice) -> bool:
    return (one.name, one.device) == (other.name, other.device)
