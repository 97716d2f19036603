"""Uplink and downlink of a simulated host. Each carries its transfers one after the other."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

from echo_hub.simulator.agenda import Agenda


class UplinkTransfer(Protocol):
    """Something to send over a `SimulatedUplink`."""

    def is_wanted(self) -> bool:
        """Return False if the transfer has become useless. Called when its turn comes."""

    def sent(self, began_at: float) -> None:
        """Handle the end of the transfer, whose first byte left at `began_at`. The last byte leaves now."""


class SimulatedUplink:
    """Sends transfers one at a time, lowest rank first. A transfer that is no longer wanted at its turn is skipped."""

    def __init__(self, agenda: Agenda, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self._agenda = agenda
        self._waiting: list[tuple[int, int, float, UplinkTransfer]] = []
        self._number = 0
        self._is_busy = False

    def send(self, num_bytes: float, transfer: UplinkTransfer, *, rank: int = 0) -> None:
        """Queue a transfer of this size."""
        self._number += 1
        heappush(self._waiting, (rank, self._number, num_bytes, transfer))
        if not self._is_busy:
            self._next(None)

    def _next(self, _nothing: None) -> None:
        self._is_busy = False
        while self._waiting:
            _, _, num_bytes, transfer = heappop(self._waiting)
            if transfer.is_wanted():
                self._is_busy = True
                began_at = self._agenda.now
                self._agenda.at(began_at + num_bytes / self.bytes_s, self._done, (transfer, began_at))
                return

    def _done(self, subject: tuple[UplinkTransfer, float]) -> None:
        transfer, began_at = subject
        transfer.sent(began_at)
        self._next(None)


class Downlink:
    """Receives transfers in the order of the calls to `receive`."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self._free_at = 0.0

    def receive(self, num_bytes: float, *, first_at: float, last_at: float) -> float:
        """Return the time at which a transfer has arrived completely.

        `first_at` and `last_at`: times at which its first and last byte could reach the downlink.
        """
        self._free_at = max(last_at, max(first_at, self._free_at) + num_bytes / self.bytes_s)
        return self._free_at
