"""A gateway's line to the hub. It finds the current hub process, and detects lost messages.

The hub announces itself by a beacon. A line belongs to one hub process, which is identified by its epoch (start time),
and numbers the hub's messages without gaps. If the hub process changes or a message is missing, the gateway disconnects
its nodes and begins a new line under a new name. So the gateway keeps no outdated state: the nodes reconnect, and the
hub tells them its state again.

    beacon  [epoch, number, run id, run name]     both numbers only grow; older beacons are ignored. A lower epoch is
                                                  valid once the hub is silent: its clock may have been set back
    told    [epoch, number, items]                1, 2, 3, …; a lower number is a repetition, a higher one shows a gap
    asked   [gateway, epoch, number, item]        only grows
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from echo_hub.gateways.broker import Broker
from echo_hub.gateways.items import Item, ItemKind
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.subjects import Subjects, beacon
from echo_shared.errors import CodecError, ConnectError

log = logging.getLogger(__name__)

HERE_S: Final = 1.0
"""Interval between the heartbeats of the hub and the gateways, in seconds."""
GONE_S: Final = 5.0
"""After this many seconds of silence, the other end counts as gone."""


class HubItems(Protocol):
    """Receives what the hub sends on a line. Implemented by `front.Front`."""

    def take(self, item: Item) -> None:
        """Handle one item. The items arrive in order."""

    async def begun(self) -> None:
        """Handle the start of a new line (a numbered message stream). Everything that the hub sent earlier is void."""


class HubLine:
    """The gateway's end of its line (a numbered message stream) to the hub."""

    def __init__(self, broker: Broker, seal: Seal, *, hub_id: str, run_name: str) -> None:
        self._broker = broker
        self._seal = seal
        self._beacon = beacon(hub_id)
        self._run_name = run_name
        self.subjects: Subjects | None = None
        """Names of the run's NATS subjects. None until the hub's first beacon (its periodic announcement) has
        arrived."""
        self.is_known = asyncio.Event()
        """Set together with `subjects`, when the run's id is known."""
        self.has_begun = asyncio.Event()
        """Set when the hub has answered on this line. Cleared when a new line begins."""
        self._name = ""
        self._newest = (0, 0)
        self._epoch = 0
        self._expected = 1
        self._number = 0
        self._heard_at = float("-inf")
        self._is_to_begin = asyncio.Event()
        self._stop_hearing: Callable[[], Awaitable[None]] | None = None

    @property
    def is_open(self) -> bool:
        """True if the hub has answered on this line and was heard within GONE_S."""
        return self._expected > 1 and not self._is_to_begin.is_set() and time.monotonic() - self._heard_at < GONE_S

    async def run(self, items: HubItems) -> None:
        """Keep a line to the hub until cancelled. Raises ConnectError if the broker does not answer at the start."""
        await self._broker.subscribe(self._beacon, self._beacon_heard)
        while True:
            try:
                async with asyncio.timeout(HERE_S):
                    await self._is_to_begin.wait()
                await self._begin(items)
            except TimeoutError:
                await self.ask([ItemKind.HERE])
            except ConnectError as error:
                log.warning("no connection to the hub: %s", error.brief)
                await asyncio.sleep(HERE_S)

    async def ask(self, item: Item) -> None:
        """Send an item to the hub. A failure is only logged."""
        if self.subjects is None or not self._name:
            return
        self._number += 1
        body = [self._name, self._epoch, self._number, item]
        try:
            await self._broker.publish(self.subjects.asked, self._seal.close(self.subjects.asked, body))
        except ConnectError as error:
            log.info("a request could not be sent to the hub: %s", error.brief)

    async def _begin(self, items: HubItems) -> None:
        await self.ask([ItemKind.GONE])
        self._name = ""
        if self._stop_hearing is not None:
            await self._stop_hearing()
            self._stop_hearing = None
        self._is_to_begin.clear()
        self.has_begun.clear()
        await items.begun()
        assert self.subjects is not None
        name = secrets.token_hex(8)
        self._epoch, self._expected, self._number = self._newest[0], 1, 0
        subject = self.subjects.told(name)
        self._stop_hearing = await self._broker.subscribe(subject, partial(self._told, items, subject))
        self._name = name
        await self.ask([ItemKind.HERE])

    async def _beacon_heard(self, message: bytes) -> None:
        try:
            epoch, number, run_id, run_name = self._seal.open(self._beacon, message)
        except CodecError as error:
            log.warning("%s", error.brief)
            return
        is_silent = time.monotonic() - self._heard_at > GONE_S
        if run_name != self._run_name or not (
            (epoch, number) > self._newest or (is_silent and epoch != self._newest[0])
        ):
            return
        if self.subjects is not None and run_id != self.subjects.run_id:
            log.warning("another run with this hub's key is also named %s: give them different names", run_name)
            return
        is_another = epoch != self._newest[0]
        self._newest, self._heard_at = (epoch, number), time.monotonic()
        self.subjects = Subjects(run_id)
        self.is_known.set()
        if is_another:
            self._is_to_begin.set()

    async def _told(self, items: HubItems, subject: str, message: bytes) -> None:
        try:
            epoch, number, told = self._seal.open(subject, message)
        except CodecError as error:
            log.warning("%s", error.brief)
            return
        if epoch != self._epoch or number < self._expected or self._is_to_begin.is_set():
            return
        if number > self._expected:
            log.warning("a message from the hub was lost: nodes reconnect")
            self._is_to_begin.set()
            return
        self._expected += 1
        self.has_begun.set()
        for item in told:
            items.take(item)
