"""Which engine runs on which device, decided anew before each start: devices vanish, say over a sleep, and return."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from echo_node.backends.registry import BackendChoice
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError

log = logging.getLogger(__name__)

PROBE_S: Final = 60.0

Look = Callable[[], tuple[Hardware, BackendChoice]]
"""Asks the machine, and chooses; blocks. Raises BackendError when there is nothing to choose."""


class EngineChooser:
    """Which engine this node runs now: call `decide` first.

    `hardware` and `choice` are then what holds, and the first choice is the one to return to.
    """

    def __init__(self, look: Look, *, on_change: Callable[[], Awaitable[None]], probe_s: float = PROBE_S) -> None:
        """`on_change` is awaited after each choice that differs from the one before it."""
        self.hardware: Hardware
        self.choice: BackendChoice
        self._look = look
        self._on_change = on_change
        self._probe_s = probe_s
        self._first: BackendChoice | None = None
        self._is_renewed = False

    @property
    def is_fallback(self) -> bool:
        return self._first is not None and not _same(self.choice, self._first)

    def renew(self) -> None:
        """The settings have changed: what is chosen next is the one to return to."""
        self._is_renewed = True

    async def decide(self) -> BackendChoice:
        """Looks at the machine as it is now. Raises BackendError."""
        before = None if self._first is None else self.choice
        self.hardware, self.choice = await asyncio.to_thread(self._look)
        if before is None or self._is_renewed:
            self._first, self._is_renewed = self.choice, False
        if before is None:
            log.info("Engine: %s on %s (%s).", self.choice.name, self.choice.device, self.choice.reason)
        elif not _same(before, self.choice):
            log.warning(
                "Engine: %s on %s (%s), no longer %s on %s.",
                *(self.choice.name, self.choice.device, self.choice.reason),
                *(before.name, before.device),
            )
            await self._on_change()
        return self.choice

    async def until_another(self) -> None:
        """Looks now and then, until `decide` would choose otherwise."""
        while True:
            await asyncio.sleep(self._probe_s)
            try:
                _, found = await asyncio.to_thread(self._look)
            except BackendError as error:
                log.warning("No engine is to be had at this moment: %s", error)
                continue
            if not _same(found, self.choice):
                return


def _same(one: BackendChoice, other: BackendChoice) -> bool:
    return (one.name, one.device) == (other.name, other.device)
