"""Watches the machine for sleep, a wrong clock, and a changed network.

After sleep or a network change the hub's connection is dead without any error, so the node reconnects at once instead
of waiting for the timeout.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import psutil

import echo_shared
from echo_node.core.clocks import SleepSense, slept
from echo_node.core.events import Incoming, Upgraded
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.engine.choosing import EngineChoosers
from echo_node.host.clock import read_clocks
from echo_node.host.trouble_log import TroubleLog
from echo_node.net.client import HubClient
from echo_shared.installation import installed_version

LOOK_S: Final = 1.0
_RELEASE_EVERY: Final = 30
"""Number of the watch's checks, one a second, between two searches for a newly installed release."""
_CLOCK: Final = "the clock"
_ANOTHER_NETWORK: Final = Trouble(TroubleCode.NETWORK_CHANGED, "This machine has changed its network; reconnecting.")


class MachineWatch:
    def __init__(
        self,
        client: HubClient,
        troubles: TroubleLog,
        chooser: EngineChoosers,
        inbox: asyncio.Queue[Incoming],
    ) -> None:
        self._client = client
        self._troubles = troubles
        self._chooser = chooser
        self._inbox = inbox
        self._looks = 0
        self._sleep = SleepSense(LOOK_S)
        self._last_addresses: frozenset[str] | None = None

    async def run(self) -> None:
        """Check the machine every second until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Check once for sleep, a wrong clock and a changed network. While the hub refuses this release as too old,
        check from time to time whether another one was installed.
        """
        reading = read_clocks()
        slept_s = self._sleep.slept_s(reading)
        if slept_s:
            self._client.reconnect(slept(slept_s))
            self._chooser.look_again()  # Devices may have come or gone during the sleep.
        if (wrong := self._client.hub_clock.trouble(reading)) is not None:
            self._troubles.begin(_CLOCK, wrong)
        else:
            self._troubles.end(_CLOCK)
        self._look_at_network()
        self._looks += 1
        is_refused = any(trouble.code is TroubleCode.TOO_OLD for trouble in self._troubles.now)
        # A hub can fill the inbox. The next search then reports the release.
        if is_refused and self._looks % _RELEASE_EVERY == 0 and not self._inbox.full():
            there = installed_version()
            if there is not None and there != echo_shared.__version__:
                self._inbox.put_nowait(Upgraded(release=there))

    def _look_at_network(self) -> None:
        last, self._last_addresses = self._last_addresses, own_addresses()
        if last is None or last == self._last_addresses:
            return
        own = self._client.own_address
        if own is None or own not in self._last_addresses:
            self._client.reconnect(_ANOTHER_NETWORK)


def own_addresses() -> frozenset[str]:
    """Return the addresses of all interfaces, including loopback. Blocks the calling thread for a fraction of a
    millisecond.
    """
    return frozenset(
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    )
