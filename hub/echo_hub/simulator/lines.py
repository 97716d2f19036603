"""Uplink and downlink of a simulated host. Each carries its transfers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from echo_hub.simulator.agenda import Agenda

Ask = Callable[[], bool]
Sent = Callable[[float], None]


class SimulatedUplink:
    """Sends transfers one at a time, lowest rank first. A transfer that is no longer wanted at its turn is skipped."""

    def __init__(self, agenda: Agenda, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self._agenda = agenda
        self._waiting: list[tuple[int, int, float, Ask, Sent]] = []
        self._number = 0
        self._is_busy = False

    def send(self, num_bytes: float, *, wanted: Ask, sent: Sent, rank: int = 0) -> None:
        """Queue a transfer. When its turn comes, `wanted` is called: False skips the transfer. `sent` is called after
        the last byte, with the time of the first byte.
        """
        self._number += 1
        heappush(self._waiting, (rank, self._number, num_bytes, wanted, sent))
        if not self._is_busy:
            self._next(None)

    def _next(self, _nothing: None) -> None:
        self._is_busy = False
        while self._waiting:
            _, _, num_bytes, wanted, sent = heappop(self._waiting)
            if wanted():
                self._is_busy = True
                began_at = self._agenda.now
                self._agenda.at(began_at + num_bytes / self.bytes_s, self._done, (sent, began_at))
                return

    def _done(self, subject: tuple[Sent, float]) -> None:
        sent, began_at = subject
        sent(began_at)
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
