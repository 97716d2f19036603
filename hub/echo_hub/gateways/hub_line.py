"""A gateway's end of its line to the hub: who the hub is now, what it says, and whether anything of that was missed.

The hub says by its beacon that it is there. A line is of one hub process and one number of messages without a gap: when
the hub is another than before, or a message is missing, the gateway parts with its nodes and begins a new line under a
new name. So nothing is kept here that could be wrong: a node that connects again is told anew all that it is to know.

    beacon  [epoch, number, run id, run name]     epoch and number only grow: what was said before says nothing new. A
                                                  lower epoch counts once the hub is silent: clocks are set back, too
    told    [epoch, number, items]                1, 2, 3, …; a lower one has come again, a higher one tells of a gap
    asked   [gateway, epoch, number, item]        only grows
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from echo_hub.gateways.broker import Broker
from echo_hub.gateways.items import Item, Kind
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.subjects import Subjects, beacon
from echo_shared.errors import CodecError, ConnectError

log = logging.getLogger(__name__)

HERE_S: Final = 1.0
"""Hub and gateways say so often that they go on."""
GONE_S: Final = 5.0
"""Whoever has been silent for so long is taken for gone."""


class HubLine:
    """`take` gets what the hub says, in order; `begun` is called when a line begins and all that was said before is
    over. `now`: any clock that only goes forward, in seconds."""

    def __init__(
        self,
        broker: Broker,
        seal: Seal,
        *,
        hub_id: str,
        run_name: str,
        take: Callable[[Item], None],
        begun: Callable[[], Awaitable[None]],
        now: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._seal = seal
        self._beacon = beacon(hub_id)
        self._run_name = run_name
        self._take = take
        self._begun = begun
        self._now = now
        self.subjects: Subjects | None = None
        """Once the hub has been there."""
        self.is_known = asyncio.Event()
        """Set with them."""
        self.has_begun = asyncio.Event()
        """Set while the hub hears this gateway."""
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
        """Whether the hub is there and hears this gateway."""
        return self._expected > 1 and not self._is_to_begin.is_set() and self._now() - self._heard_at < GONE_S

    async def run(self) -> None:
        """Keeps the line for ever. Raises ConnectError when the broker does not answer at the start."""
        await self._broker.subscribe(self._beacon, self._beacon_heard)
        while True:
            try:
                async with asyncio.timeout(HERE_S):
                    await self._is_to_begin.wait()
                await self._begin()
            except TimeoutError:
                await self.ask([Kind.HERE])
            except ConnectError as error:
                log.warning("the line to the hub is not there: %s", error.brief)
                await asyncio.sleep(HERE_S)

    async def ask(self, item: Item) -> None:
        """Says it to the hub, if it is there to hear it."""
        if self.subjects is None or not self._name:
            return
        self._number += 1
        body = [self._name, self._epoch, self._number, item]
        try:
            await self._broker.publish(self.subjects.asked, self._seal.close(self.subjects.asked, body))
        except ConnectError as error:
            log.info("the hub was not asked: %s", error.brief)

    async def _begin(self) -> None:
        await self.ask([Kind.GONE])
        self._name = ""
        if self._stop_hearing is not None:
            await self._stop_hearing()
            self._stop_hearing = None
        self._is_to_begin.clear()
        self.has_begun.clear()
        await self._begun()
        assert self.subjects is not None
        name = secrets.token_hex(8)
        self._epoch, self._expected, self._number = self._newest[0], 1, 0
        subject = self.subjects.told(name)

        async def heard(message: bytes) -> None:
            self._told(subject, message)

        self._stop_hearing = await self._broker.subscribe(subject, heard)
        self._name = name
        await self.ask([Kind.HERE])

    async def _beacon_heard(self, message: bytes) -> None:
        try:
            epoch, number, run_id, run_name = self._seal.open(self._beacon, message)
        except CodecError as error:
            log.warning("%s", error.brief)
            return
        is_silent = self._now() - self._heard_at > GONE_S
        if run_name != self._run_name or not (
            (epoch, number) > self._newest or (is_silent and epoch != self._newest[0])
        ):
            return
        if self.subjects is not None and run_id != self.subjects.run_id:
            log.warning("another run of this hub's key is called %s, too: their names must differ", run_name)
            return
        is_another = epoch != self._newest[0]
        self._newest, self._heard_at = (epoch, number), self._now()
        self.subjects = Subjects(run_id)
        self.is_known.set()
        if is_another:
            self._is_to_begin.set()

    def _told(self, subject: str, message: bytes) -> None:
        try:
            epoch, number, items = self._seal.open(subject, message)
        except CodecError as error:
            log.warning("%s", error.brief)
            return
        if epoch != self._epoch or number < self._expected or self._is_to_begin.is_set():
            return
        if number > self._expected:
            log.warning("something that the hub said was lost: nodes connect again")
            self._is_to_begin.set()
            return
        self._expected += 1
        self.has_begun.set()
        for item in items:
            self._take(item)
