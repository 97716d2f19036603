"""Swarm client for platforms without libtorrent. It sends HTTP range requests to the hub's web seed.

It cannot serve other nodes. It checks pieces against the torrent's hashes, so a fetch resumes from the files on disk
and requests damaged pieces again.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import random
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from echo_shared.errors import CodecError, LocalProtocolError, SwarmError
from echo_shared.process.threads import in_thread
from echo_shared.swarm.base import (
    FetchStats,
    OnProgress,
    PeerAddress,
    Swarm,
    SwarmSettings,
    TorrentStats,
    stalled,
)
from echo_shared.swarm.piece_file import PieceFile
from echo_shared.swarm.router_ports import RouterPorts
from echo_shared.swarm.torrent import TorrentLayout, read_torrent
from echo_shared.wire.messages.fields import printable_line
from echo_shared.wire.rate_cap import RateCap

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 16 * 2**20
"""Bytes that the client requests from the web seed before it reports progress."""
_READ_BYTES: Final = 256 * 1024
_ANSWER_TIMEOUT_S: Final = 10.0
_FIRST_DELAY_S: Final = 0.5
_LONGEST_DELAY_S: Final = 15.0


class WebSeedSwarm(Swarm):
    """Fetches from the hub's web seed (plain HTTP), and serves nothing."""

    def __init__(self, settings: SwarmSettings) -> None:
        self._settings = settings
        self.router = RouterPorts(unasked="that takes libtorrent, which is not installed")
        self._downloads: dict[bytes, _Download] = {}
        self._cap = RateCap(settings.download_limit_bytes_s)
        self._received_bytes = 0
        """Bytes received by downloads that have ended."""

    def open_port(self, port: int) -> None:
        """Do nothing: only libtorrent can ask a router."""

    async def seed(self, torrent: bytes, directory: Path, tracker_urls: Iterable[str] = ()) -> None:
        """Do nothing: only libtorrent can serve."""

    async def fetch(
        self,
        torrent: bytes,
        parent: Path,
        *,
        peers: Iterable[PeerAddress] = (),
        tracker_urls: Iterable[str] = (),
        web_seed_url: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> FetchStats:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        layout = read_torrent(torrent)
        if layout.info_hash in self._downloads:
            raise LocalProtocolError(f"{layout.name} is already being fetched.")
        if web_seed_url is None:
            raise SwarmError(
                f"{layout.name} cannot be fetched.",
                got="no web seed is set, and libtorrent is not installed",
                do="Install libtorrent.",
            )

        download = _Download(
            layout, parent, url=web_seed_url, settings=self._settings, cap=self._cap, on_progress=on_progress
        )
        self._downloads[layout.info_hash] = download
        try:
            await download.run()
        finally:
            del self._downloads[layout.info_hash]
            self._received_bytes += download.received_bytes
        return FetchStats(seconds=loop.time() - started_at, swarm_bytes=0, web_seed_bytes=download.received_bytes)

    async def add_peers(self, info_hash: bytes, peers: Iterable[PeerAddress]) -> None:
        """Do nothing: peers speak BitTorrent, which this client does not."""

    async def remove(self, info_hash: bytes) -> None:
        if (download := self._downloads.get(info_hash)) is not None:
            await download.stop()

    async def stats(self) -> Mapping[bytes, TorrentStats]:
        return {
            info_hash: TorrentStats(peers=0, downloaded_bytes=download.received_bytes, uploaded_bytes=0, complete=False)
            for info_hash, download in self._downloads.items()
        }

    async def traffic(self) -> tuple[int, int]:
        under_way = sum(download.received_bytes for download in self._downloads.values())
        return 0, self._received_bytes + under_way

    def set_online(self, is_online: bool) -> None:
        """Do nothing: the client serves nothing, and callers cancel their own fetches."""

    async def close(self) -> None:
        for download in tuple(self._downloads.values()):
            await download.stop()


class _Download:
    """One fetch. It runs in a thread, because HTTP requests block."""

    def __init__(
        self,
        layout: TorrentLayout,
        parent: Path,
        *,
        url: str,
        settings: SwarmSettings,
        cap: RateCap,
        on_progress: OnProgress | None,
    ) -> None:
        self.received_bytes = 0
        self._layout = layout
        self._pieces = PieceFile(layout, parent)
        self._url = f"{url}{quote(layout.name)}/"
        self._stall_timeout_s = settings.stall_timeout_s
        self._cap = cap
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Fetch until every piece is on disk. When cancelled, it raises only after its thread has ended."""
        try:
            complete = await in_thread(self._work, stop=self._stopping)
        finally:
            self._ended.set()
        if not complete:
            raise SwarmError(f"The transfer of {self._layout.name} stopped.", got="it was removed")

    async def stop(self) -> None:
        self._stopping.set()
        await self._ended.wait()

    def _work(self) -> bool:
        """Fetch everything; return False if `stop` ended the download early."""
        try:
            self._pieces.open()
            self._report()
            return self._fetch_missing()
        finally:
            self._pieces.close()

    def _report(self) -> None:
        if self._on_progress is not None:
            done_bytes, total_bytes = self._pieces.done_bytes, self._layout.total_bytes
            self._loop.call_soon_threadsafe(self._on_progress, done_bytes, total_bytes)

    def _fetch_missing(self) -> bool:
        """Request missing pieces repeatedly until all are on disk; return False if `stop` ended the download. Raises
        SwarmError after `stall_timeout_s` without a valid piece.
        """
        delay_s, last_good_at, problem = _FIRST_DELAY_S, time.monotonic(), ""
        while not self._pieces.complete:
            before_bytes = self._pieces.done_bytes
            try:
                self._ask_for_missing()
                problem = "pieces do not match their hash"
            except (OSError, http.client.HTTPException) as error:
                problem = printable_line(str(error))
            if self._stopping.is_set():
                return False
            if self._pieces.done_bytes > before_bytes:
                delay_s, last_good_at = _FIRST_DELAY_S, time.monotonic()
            elif (quiet_s := time.monotonic() - last_good_at) >= self._stall_timeout_s:
                raise stalled(self._layout.name, after_s=quiet_s, last_problem=f"{self._url}: {problem}")
            if not self._pieces.complete:
                log.info("The web seed %s fails: %s", self._url, problem)
                self._stopping.wait(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return True

    def _ask_for_missing(self) -> None:
        """Request every missing piece once. Raises the OSError or HTTPException of the first failure."""
        most = max(1, _BATCH_BYTES // self._layout.piece_bytes)
        for batch in _batches(sorted(self._pieces.missing), most=most):
            piece, data = batch.start, bytearray()
            try:
                for received in self._get(batch):
                    data += received
                    while piece in batch and len(data) >= (size := self._layout.size_of_piece(piece)):
                        self._keep(piece, bytes(data[:size]))
                        del data[:size]
                        piece += 1
            finally:
                self._report()
            if self._stopping.is_set():
                return

    def _keep(self, piece: int, data: bytes) -> None:
        try:
            self._pieces.write(piece, data)
        except CodecError as error:
            log.info("From the web seed %s: %s", self._url, error)

    def _get(self, batch: range) -> Iterator[bytes]:
        """Yield the bytes of these pieces in order. Raises OSError if the web seed sends fewer bytes."""
        for wanted in self._layout.slices(batch.start, batch.stop):
            request = urllib.request.Request(
                self._url + quote(wanted.path),
                headers={"Range": f"bytes={wanted.offset}-{wanted.offset + wanted.length - 1}"},
            )
            left = wanted.length
            with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
                if answer.status != 206:
                    raise OSError(errno.EPROTO, f"HTTP status {answer.status} instead of 206 for a range request")
                while left:
                    if self._stopping.is_set():
                        return
                    data = answer.read(min(left, _READ_BYTES))
                    if not data:
                        raise OSError(errno.EPROTO, f"{wanted.path} ended {left} bytes early")
                    left -= len(data)
                    self.received_bytes += len(data)
                    self._stopping.wait(self._cap.delay_s(len(data), time.monotonic()))
                    yield data


def _batches(pieces: Sequence[int], *, most: int) -> Iterator[range]:
    """Split ascending piece numbers into ranges without gaps, of at most `most` pieces each."""
    start = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or pieces[end] != pieces[end - 1] + 1 or end - start == most:
            yield range(pieces[start], pieces[end - 1] + 1)
            start = end
