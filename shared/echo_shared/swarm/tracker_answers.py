"""Which of this machine's addresses a tracker answers, and which of its silences matter.

libtorrent announces a torrent from each address of this machine, through that address's network device. A hub on this
machine at 127.0.0.1, for example, is asked through lo and through eth0, and nothing comes back through eth0. One
announce that gets through is enough: the hub knows the node then.
"""

from __future__ import annotations

from echo_shared.swarm.base import PeerAddress


class TrackerAnswers:
    """Of one torrent's announces."""

    def __init__(self) -> None:
        self._answered: set[PeerAddress] = set()
        """Own addresses whose last announce was answered."""

    def answered(self, local: PeerAddress) -> None:
        """Note that an announce from this address was answered."""
        self._answered.add(local)

    def failed(self, local: PeerAddress, times_in_row: int) -> bool:
        """Note that an announce from this address was not answered; return True if it matters.

        Without an answer to any address, the first failure of each says nothing yet: the others are still waiting.
        """
        if local in self._answered:
            self._answered.remove(local)
            return not self._answered
        return not self._answered and times_in_row > 1
