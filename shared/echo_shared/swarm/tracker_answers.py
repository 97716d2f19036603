"""Decides which failed tracker announces are reported.

libtorrent announces a torrent from each address of this machine, through that address's network device. For example, it
announces to a hub at 127.0.0.1 through lo and through eth0, and only lo gets an answer. One answered announce is
enough: the hub then knows the node.
"""

from __future__ import annotations

from echo_shared.swarm.base import PeerAddress


class TrackerAnswers:
    def __init__(self) -> None:
        self._answered: set[PeerAddress] = set()
        """Local addresses whose last announce was answered."""

    def answered(self, local: PeerAddress) -> None:
        """Record that the tracker answered an announce from the address `local`."""
        self._answered.add(local)

    def failed(self, local: PeerAddress, times_in_row: int) -> bool:
        """Record a failed announce from the address `local`; return True if it should be reported.

        A first failure is not reported: announces from other addresses may still be answered. No failure is reported
        while another address has an answer.
        """
        if local in self._answered:
            self._answered.remove(local)
            return not self._answered
        return not self._answered and times_in_row > 1
