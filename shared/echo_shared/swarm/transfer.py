"""State of one torrent in libtorrent's session, updated by libtorrent's alerts (events)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import libtorrent as lt

from echo_shared.errors import EchoError, SwarmError
from echo_shared.swarm.base import OnProgress, PeerAddress
from echo_shared.swarm.disk import storage_error
from echo_shared.swarm.torrent import TorrentLayout
from echo_shared.swarm.tracker_answers import TrackerAnswers
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

_INCOMPLETE: Final = (lt.torrent_status.states.checking_files, lt.torrent_status.states.downloading)


class Transfer:
    def __init__(self, layout: TorrentLayout, parent: Path, *, on_progress: OnProgress | None) -> None:
        self.layout = layout
        self.handle = lt.torrent_handle()
        self.error: EchoError | None = None
        self.checked = asyncio.Event()
        """Set once libtorrent has checked the files that it found on disk."""
        self.finished = asyncio.Event()
        """Set when the transfer is complete or has failed."""
        self.flushed = asyncio.Event()
        self.removing = False
        self.removed = asyncio.Event()
        self.web_seed_addresses: frozenset[PeerAddress] = frozenset()
        """Addresses of the web seed. They identify its blocks: an alert about a block names only the
        sender's address.
        """
        self.web_seed_bytes = 0
        """Bytes received from the web seed. The last blocks are missing, because libtorrent does not report blocks that
        it writes after the last piece is complete.
        """
        self.last_problem = ""
        self.last_block_at = self.last_piece_at = asyncio.get_running_loop().time()
        """Time of the last received block, and of the last piece that matched its hash."""
        self._parent = parent
        self._on_progress = on_progress
        self._done_bytes = 0
        self._damaged = False
        self._tracker = TrackerAnswers()

    @property
    def complete(self) -> bool:
        return self.finished.is_set() and self.error is None

    def fail(self, error: EchoError) -> None:
        """End the transfer with `error`, and set its events. Code that waits for one of the events must then read
        `error`.
        """
        self.error = self.error or error
        for event in (self.checked, self.finished, self.flushed):
            event.set()

    def abandon(self) -> None:
        """End the transfer because the session closes, after which no further alert comes."""
        self.fail(stopped(self.layout, got="the swarm was closed"))
        self.removed.set()

    def connect(self, peers: Iterable[PeerAddress]) -> None:
        """Connect to peers by their IP addresses, unless the torrent is being removed: its handle is invalid before
        libtorrent's alert says so.
        """
        if not self.removing:
            for peer in peers:
                self.handle.connect_peer(peer)

    def recheck_after_damage(self) -> None:
        """Check the files again if a piece has failed its hash check.

        libtorrent 2.1.1 sometimes never requests such a piece again once the peer that sent it has disconnected.
        """
        if self._damaged:
            self._damaged = False
            self._done_bytes = 0
            self.handle.force_recheck()

    def handle_alert(self, alert: lt.alert, now: float) -> None:
        match alert:
            case lt.block_finished_alert():
                self.last_block_at = now
                if alert.endpoint in self.web_seed_addresses:
                    self.web_seed_bytes += self.layout.size_of_block(alert.piece_index, alert.block_index)
            case lt.piece_finished_alert():
                self.last_piece_at = now
                self._piece_finished(alert.piece_index)
            case lt.torrent_checked_alert():
                self.last_block_at = self.last_piece_at = now
                self.checked.set()
            case lt.torrent_finished_alert():
                self.finished.set()
            case lt.cache_flushed_alert():
                self.flushed.set()
            case lt.torrent_removed_alert():
                self.removed.set()
            case lt.file_error_alert():
                self._break(storage_error(alert.message(), code=alert.error.value(), path=self._parent))
            case lt.state_changed_alert() if self.complete and alert.state in _INCOMPLETE:
                self._break(
                    SwarmError(f"Files of {self.layout.name} were changed or removed.", do="Fetch the artefact again.")
                )
            case lt.torrent_error_alert():
                self._break(stopped(self.layout, got=printable_line(alert.message())))
            case lt.hash_failed_alert():
                self._damaged = True
                self._note(alert.message())
            case lt.url_seed_alert():
                self._note(f"web seed error: {alert.error_message() or alert.error.message()}")
            case lt.tracker_reply_alert():
                self._tracker.answered(alert.local_endpoint)
            case lt.tracker_error_alert():
                self._tracker_failed(alert)

    def _tracker_failed(self, alert: lt.tracker_error_alert) -> None:
        # Do not log the alert's full message: it contains the tracker's address with the passkey.
        if reason := alert.failure_reason():
            self._note(f"tracker error: {reason}")
            return
        silence = f"the tracker cannot be reached from {alert.local_endpoint[0]}: {alert.error.message()}"
        if self._tracker.failed(alert.local_endpoint, alert.times_in_row):
            self._note(silence)
        else:
            log.debug("%s: %s", self.layout.name, silence)

    def _break(self, error: EchoError) -> None:
        if self.complete:
            # No caller waits for a transfer that only seeds, so only the log reports its error.
            log.warning("%s", error.brief)
        self.fail(error)

    def _note(self, problem: str) -> None:
        # The text comes from trackers and web seeds, which are not trusted.
        self.last_problem = printable_line(problem)
        log.info("%s: %s", self.layout.name, self.last_problem)

    def _piece_finished(self, piece: int) -> None:
        total = self.layout.total_bytes
        self._done_bytes = min(total, self._done_bytes + self.layout.size_of_piece(piece))
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, total)


def stopped(layout: TorrentLayout, *, got: str) -> SwarmError:
    return SwarmError(f"The transfer of {layout.name} stopped.", got=got)
