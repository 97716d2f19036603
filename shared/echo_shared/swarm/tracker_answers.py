"""Decides which unanswered tracker announces are worth reporting.

libtorrent announces a torrent from each address of this machine, through that address's network device. For example, it
announces to a hub at 127.0.0.1 through lo and through eth0, and only lo gets an answer. One answered announce is
enough: the hub then knows the node.
"""

from __future__ import annotations

from echo_shared.swarm.base import PeerAddress


class TrackerAnswers:
    """Answered and unanswered announces of one torrent."""

    def __init__(self) -> None:
        self._answered: set[PeerAddress] = set()
        """Local addresses whose last announce was answered."""

    def answered(self, local: PeerAddress) -> None:
        """Note that the tracker answered an announce from this address."""
        self._answered.add(local)

    def failed(self, local: PeerAddress, times_in_row: int) -> bool:
        """Note a failed announce from this address; return True if it should be reported.

        A first failure is ignored until an address has an answer: the announces of other addresses may still be open.
        """
        if local in self._answered:
            self._answered.remove(local)
            return not self._answered
        return not self._answered and times_in_row > 1
