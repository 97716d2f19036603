"""Swarm client based on libtorrent.

libtorrent runs its own threads. It signals new alerts (its events) through a socket; the event loop then reads the
alerts and passes each to its transfer, without polling. The signal is a socket because a Python callback would wait for
the interpreter lock while libtorrent holds its own lock, which deadlocks when the session closes.

libtorrent checks every piece against its hash and bans peers that send wrong bytes, so neither a peer nor the web seed
can corrupt a fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import libtorrent as lt

from echo_shared.errors import CodecError, LocalProtocolError, SwarmError
from echo_shared.swarm import bencode
from echo_shared.swarm.base import (
    FetchStats,
    OnProgress,
    PeerAddress,
    Swarm,
    SwarmSettings,
    TorrentStats,
    resolve,
    stalled,
)
from echo_shared.swarm.listening import bindable, cannot_listen, interfaces, why_unasked
from echo_shared.swarm.router_ports import RouterPorts
from echo_shared.swarm.torrent import BLOCK_BYTES, TorrentLayout, piece_hash, read_torrent
from echo_shared.swarm.transfer import Transfer, stopped
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

_TUNED: Final = {
    # The swarm is private: only the hub supplies peers.
    "enable_dht": False,
    "enable_lsd": False,
    "allow_multiple_connections_per_ip": True,  # Several nodes may share one address, behind a NAT or on one machine.
    # Connect by TCP where possible, because uTP yields to other traffic. libtorrent by itself would try uTP first (see
    # `_UTP_S`).
    "enable_outgoing_utp": False,
    "peer_connect_timeout": 3,
    "mixed_mode_algorithm": 0,
    "utp_gain_factor": 30_000,  # libtorrent's default, 3,000, makes a transfer take twice as long at 0.2 % packet loss.
    # Connect to all peers at once, and reconnect soon after a loss.
    "unchoke_slots_limit": -1,
    "connection_speed": 500,
    "torrent_connect_boost": 100,
    "smooth_connects": False,
    "min_reconnect_time": 1,
    "max_failcount": 20,
    "peer_turnover": 0,
    "close_redundant_connections": False,
    # Short queues, fast forwarding of new pieces, fast recovery from stalled peers.
    "tick_interval": 100,
    "request_queue_time": 1,
    "max_out_request_queue": 500,
    "max_allowed_in_request_queue": 32,
    "initial_picker_threshold": 0,
    "predictive_piece_announce": 50,
    "piece_timeout": 4,
    "request_timeout": 8,
    "urlseed_wait_retry": 2,
    "send_buffer_watermark": 512 * 1024,
    "hashing_threads": 1,
    "stop_tracker_timeout": 1,
    # If the port is taken, libtorrent must report an error, not listen on another port.
    "listen_system_port_fallback": False,
    "max_retry_port_bind": 0,
    "alert_queue_size": 100_000,
    "alert_mask": int(
        lt.alert_category.error
        | lt.alert_category.status
        | lt.alert_category.storage
        | lt.alert_category.tracker
        | lt.alert_category.piece_progress
        | lt.alert_category.block_progress
        | lt.alert_category.port_mapping
        | lt.alert_category.connect
    ),
}
_PROTOCOLS: Final = {lt.portmap_transport.upnp: "UPnP", lt.portmap_transport.natpmp: "NAT-PMP"}
"""Names of the protocols that open a router's ports. libtorrent's NAT-PMP is PCP where the router speaks it."""
_UTP_S: Final = 30.0
"""Seconds during which libtorrent connects by uTP, after a TCP connection got no answer. If two peers behind routers
both try, each peer's outgoing packets make its router accept the other peer's packets. Routers forget an unanswered
packet after about this time.
"""
_LEAST_WAIT_S: Final = 1.0
_STATS_S: Final = 5.0
"""Seconds to wait for libtorrent's statistics. After that, the previous statistics are returned."""
_REVIVE_WEB_SEED_AFTER_S: Final = 15.0
"""Minimum seconds between two additions of the web seed. Adding it again revives a web seed that libtorrent has
dropped, but interrupts one that is still connecting.
"""
_RECHECK_AFTER_S: Final = 5.0
"""Seconds without a new block, after a piece failed its hash check, until libtorrent checks the files on disk again."""


class BitTorrentSwarm(Swarm):
    """A libtorrent session, used from one event loop. Call `listen` first."""

    def __init__(self, settings: SwarmSettings) -> None:
        self._settings = settings
        self.router = RouterPorts(unasked=why_unasked(settings))
        self._session: lt.session | None = None
        self._transfers: dict[bytes, Transfer] = {}
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Future[int] = self._loop.create_future()
        self._utp_end: asyncio.TimerHandle | None = None
        """Timer that ends the attempts to connect by uTP."""
        self._traffic = (0, 0)
        self._traffic_told = asyncio.Event()

    async def listen(self) -> None:
        _trust_what_python_trusts()
        host, port = bindable(self._settings.listen_host, self._settings.port)
        settings: Any = {
            **_TUNED,
            "listen_interfaces": interfaces(host, port),
            "enable_upnp": self._settings.router_ports,
            "enable_natpmp": self._settings.router_ports,
            "upload_rate_limit": self._settings.upload_limit_bytes_s,
            "download_rate_limit": self._settings.download_limit_bytes_s,
        }
        self._session = lt.session(settings)
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._session.set_alert_fd(self._rope.fileno())
        self._listener = asyncio.create_task(self._take_alerts_when_rung(), name="swarm-alerts")
        try:
            self.port = await self._listening
        except SwarmError:
            await self.close()
            raise

    async def _take_alerts_when_rung(self) -> None:
        while True:
            await self._loop.sock_recv(self._bell, 64)
            try:
                self._take_alerts()
            except Exception:  # One transfer's failing callback must not stop other transfers' alerts.
                log.exception("A libtorrent alert could not be handled.")

    def _take_alerts(self) -> None:
        if self._session is None:
            return
        now = self._loop.time()
        for alert in self._session.pop_alerts():
            if isinstance(alert, lt.peer_disconnected_alert):
                if alert.op == lt.operation_t.connect and alert.socket_type == lt.socket_type_t.tcp:
                    self._try_utp()
            elif isinstance(alert, lt.torrent_alert):
                transfer = self._transfers.get(_info_hash_of(alert))
                if transfer is not None:
                    transfer.handle_alert(alert, now)
            else:
                self._handle_session_alert(alert)

    def _handle_session_alert(self, alert: lt.alert) -> None:
        match alert:
            case lt.listen_succeeded_alert() if not self._listening.done():
                self.router.listening_at(alert.port)
                self._listening.set_result(alert.port)
            case lt.listen_failed_alert() if not self._listening.done():
                self._listening.set_exception(cannot_listen(alert.message()))
            case lt.portmap_alert() if alert.map_protocol == lt.portmap_protocol.tcp:
                self.router.granted(alert.mapping, alert.external_port, _PROTOCOLS[alert.map_transport])
            case lt.portmap_error_alert():
                reason = printable_line(alert.error.message())
                self.router.refused(alert.mapping, _PROTOCOLS[alert.map_transport], reason)
            case lt.session_stats_alert():
                self._traffic = alert.values["net.sent_bytes"], alert.values["net.recv_bytes"]
                self._traffic_told.set()
            case lt.alerts_dropped_alert():
                log.warning("libtorrent dropped alerts because they were read too slowly: byte counts may be too low.")

    def _try_utp(self) -> None:
        """Connect by uTP for `_UTP_S` from now on: a TCP connection has failed."""
        if self._utp_end is not None:
            self._utp_end.cancel()
        elif self._session is not None:
            self._session.apply_settings({"enable_outgoing_utp": True})
        self._utp_end = self._loop.call_later(_UTP_S, self._end_utp)

    def _end_utp(self) -> None:
        self._utp_end = None
        if self._session is not None:
            self._session.apply_settings({"enable_outgoing_utp": False})

    def open_port(self, port: int) -> None:
        if self._session is not None and self._settings.router_ports:
            self.router.requested(port, self._session.add_port_mapping(lt.portmap_protocol.tcp, port, port))

    async def seed(self, torrent: bytes, directory: Path, tracker_urls: Iterable[str] = ()) -> None:
        layout = read_torrent(torrent)
        if (running := self._transfers.get(layout.info_hash)) is not None and running.error is None:
            return
        if not await asyncio.to_thread(layout.fits, directory):
            raise SwarmError(
                "A directory to seed does not match its torrent.",
                got=f"{directory}, torrent of {layout.name}",
                do="Wait: it is published or fetched again automatically.",
            )
        transfer = Transfer(layout, directory.parent, on_progress=None)
        transfer.finished.set()  # Count the seeded files as complete until libtorrent reports otherwise.
        params = _params(layout, directory.parent, tracker_urls)
        params.flags |= lt.torrent_flags.seed_mode
        await self._add(transfer, params)

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
        started_at = self._loop.time()
        layout = read_torrent(torrent)
        params = _params(layout, parent, tracker_urls)
        params.peers = await resolve(peers)
        transfer = Transfer(layout, parent, on_progress=on_progress)
        if web_seed_url is not None:
            transfer.web_seed_addresses = frozenset(await resolve([_server_of(web_seed_url)]))
        if (running := self._transfers.get(layout.info_hash)) is not None and running.complete:
            return FetchStats(seconds=0, swarm_bytes=0, web_seed_bytes=0)
        await self._add(transfer, params)
        try:
            has_peers = bool(params.peers or params.trackers)
            await self._until_finished(
                transfer, web_seed_url, patience_s=self._settings.web_seed_after_s if has_peers else 0
            )
            if transfer.complete:
                transfer.flushed.clear()
                transfer.handle.flush_cache()  # The last blocks may not be in their files yet.
                await transfer.flushed.wait()
            if transfer.error is not None:
                raise transfer.error
            seconds = self._loop.time() - started_at
            received_bytes, from_web_seed_bytes = await asyncio.to_thread(_received, transfer)
            # The torrent was removed in the meantime; libtorrent may still have answered.
            if transfer.error is not None:
                raise transfer.error
        except BaseException:
            await self._remove(transfer)
            raise
        web_seed_bytes = min(received_bytes, max(transfer.web_seed_bytes, from_web_seed_bytes))
        return FetchStats(seconds=seconds, swarm_bytes=received_bytes - web_seed_bytes, web_seed_bytes=web_seed_bytes)

    async def _until_finished(self, transfer: Transfer, web_seed_url: str | None, *, patience_s: float) -> None:
        """Wait for the end of the transfer. Add the web seed after `patience_s` seconds without data from any peer."""
        stall_s = self._settings.stall_timeout_s
        asked_web_seed_at = -math.inf
        if patience_s:
            # Wait for libtorrent's check of the files: libtorrent connects at once to a web seed added after the check.
            await transfer.checked.wait()
        while not transfer.finished.is_set():
            now = self._loop.time()
            quiet_s, stalled_s = now - transfer.last_block_at, now - transfer.last_piece_at
            if stalled_s >= stall_s:
                raise stalled(transfer.layout.name, after_s=stalled_s, last_problem=transfer.last_problem)
            if web_seed_url and quiet_s >= patience_s and now - asked_web_seed_at >= _REVIVE_WEB_SEED_AFTER_S:
                asked_web_seed_at = now
                # Remove the web seed and add it again, to revive a web seed that libtorrent has dropped.
                transfer.handle.remove_url_seed(web_seed_url)
                transfer.handle.add_url_seed(web_seed_url)
            if quiet_s >= _RECHECK_AFTER_S:
                transfer.recheck_after_damage()
            wait_s = patience_s - quiet_s if quiet_s < patience_s else _LEAST_WAIT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, _RECHECK_AFTER_S, stall_s - stalled_s)):
                    await transfer.finished.wait()

    async def add_peers(self, info_hash: bytes, peers: Iterable[PeerAddress]) -> None:
        if info_hash not in self._transfers:
            return
        addresses = await resolve(peers)
        if (transfer := self._transfers.get(info_hash)) is not None:
            transfer.connect(addresses)

    async def remove(self, info_hash: bytes) -> None:
        if (transfer := self._transfers.get(info_hash)) is not None:
            await self._remove(transfer)

    async def _remove(self, transfer: Transfer) -> None:
        info_hash = transfer.layout.info_hash
        if self._session is None or self._transfers.get(info_hash) is not transfer:
            return
        transfer.fail(stopped(transfer.layout, got="it was removed"))
        try:
            if not transfer.removing:
                transfer.removing = True
                self._session.remove_torrent(transfer.handle)
            await transfer.removed.wait()
        finally:
            self._transfers.pop(info_hash, None)

    async def stats(self) -> Mapping[bytes, TorrentStats]:
        handles = {info_hash: transfer.handle for info_hash, transfer in self._transfers.items()}
        return await asyncio.to_thread(_stats_of, handles)

    async def traffic(self) -> tuple[int, int]:
        if self._session is not None:
            self._traffic_told.clear()
            self._session.post_session_stats()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATS_S):
                    await self._traffic_told.wait()
        return self._traffic

    def set_online(self, is_online: bool) -> None:
        if self._session is not None:
            (self._session.resume if is_online else self._session.pause)()

    async def close(self) -> None:
        for transfer in self._transfers.values():
            transfer.abandon()
        self._transfers.clear()
        if self._session is None:
            return
        if self._utp_end is not None:
            self._utp_end.cancel()
        last_reference = [self._session]
        self._session = None
        self._listener.cancel()
        await asyncio.wait({self._listener})
        # Closing a session blocks while trackers are notified, for at most stop_tracker_timeout.
        await asyncio.to_thread(last_reference.clear)
        self._bell.close()
        self._rope.close()

    async def _add(self, transfer: Transfer, params: lt.add_torrent_params) -> None:
        """Add the torrent to the session. A failed transfer of the same torrent is replaced."""
        info_hash = transfer.layout.info_hash
        if (running := self._transfers.get(info_hash)) is not None and running.error is not None:
            await self._remove(running)
        if info_hash in self._transfers:
            raise LocalProtocolError(f"{transfer.layout.name} is already being fetched.")
        if self._session is None:
            raise LocalProtocolError("The swarm is closed.")
        try:
            transfer.handle = self._session.add_torrent(params)
        except RuntimeError as error:
            raise SwarmError(f"The transfer of {transfer.layout.name} cannot start.", got=str(error)) from error
        self._transfers[info_hash] = transfer


def _params(layout: TorrentLayout, parent: Path, tracker_urls: Iterable[str]) -> lt.add_torrent_params:
    """Return libtorrent's parameters for a torrent.

    Raises CodecError unless libtorrent finds the same files as `read_torrent`; SwarmError if the path is not UTF-8.
    """
    try:
        params = lt.load_torrent_buffer(layout.torrent)
        assert params.ti is not None
        files = params.ti.layout()
        read = [(Path(files.file_path(i)).as_posix(), files.file_size(i)) for i in range(files.num_files())]
    except RuntimeError as error:
        raise CodecError("libtorrent cannot read a torrent.", got=str(error)) from error
    if read != [(f"{layout.name}/{path}", size) for path, size in layout.files]:
        raise CodecError("libtorrent finds other files in a torrent.", got=f"{len(read)} files of {layout.name!r}")
    params.save_path = _utf8(parent)
    params.trackers = list(tracker_urls)
    params.url_seeds = []
    params.http_seeds = []
    params.dht_nodes = []
    params.flags &= ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    return params


def _utf8(path: Path) -> str:
    """Return the path in UTF-8, which libtorrent needs even if Python's file name encoding differs. Raises
    SwarmError.
    """
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError as error:
        raise SwarmError(
            "libtorrent cannot write to this directory.",
            got=f"a name that is not UTF-8: {str(path)!a}",
            do="Use a directory whose name is UTF-8.",
        ) from error


def check_libtorrent() -> None:
    """Raise SwarmError if the installed libtorrent cannot read a torrent.

    This is fast enough for every start; `echo_shared.swarm.trial` is the full test.
    """
    info: bencode.Encodable = {
        "files": [{"length": 1, "path": ["file"]}],
        "name": "trial",
        "piece length": BLOCK_BYTES,
        "pieces": piece_hash(b"x"),
        "private": 1,
    }
    try:
        _params(read_torrent(bencode.encode({"info": info})), Path(), ())
    except (AttributeError, TypeError, CodecError) as error:
        raise SwarmError(
            "This version of libtorrent does not work with Echo.",
            got=f"libtorrent {lt.__version__}: {error}",
            do="Install libtorrent 2.1.1, or a newer version that Echo was tested with.",
        ) from error


def _server_of(url: str) -> PeerAddress:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _info_hash_of(alert: lt.torrent_alert) -> bytes:
    # The handle of a removed torrent has lost its hash.
    if isinstance(alert, lt.torrent_removed_alert | lt.torrent_deleted_alert | lt.torrent_delete_failed_alert):
        return bytes(alert.info_hashes.v1.to_bytes())
    return bytes(alert.handle.info_hashes().v1.to_bytes())


def _received(transfer: Transfer) -> tuple[int, int]:
    """Return (all payload bytes, payload bytes from the currently connected web seeds). Blocks the calling thread.
    Raises SwarmError if the torrent has been removed.
    """
    try:
        peers, status = transfer.handle.get_peer_info(), transfer.handle.status()
    except RuntimeError as error:
        raise transfer.error or stopped(transfer.layout, got=str(error)) from error
    web_seed_bytes = sum(peer.total_download for peer in peers if peer.connection_type == lt.peer_info.web_seed)
    return status.total_payload_download, web_seed_bytes


def _stats_of(handles: Mapping[bytes, lt.torrent_handle]) -> dict[bytes, TorrentStats]:
    stats = {}
    for info_hash, handle in handles.items():
        with contextlib.suppress(RuntimeError):  # The torrent was removed in the meantime.
            status = handle.status()
            stats[info_hash] = TorrentStats(
                peers=status.num_peers,
                downloaded_bytes=status.total_payload_download,
                uploaded_bytes=status.total_payload_upload,
                complete=status.is_seeding,
            )
    return stats


def _trust_what_python_trusts() -> None:
    """Point libtorrent's own OpenSSL to the certificates that Python uses.

    Its default path is that of its build machine, so every https tracker and web seed would fail. On Windows,
    libtorrent uses the system's certificates.
    """
    paths = ssl.get_default_verify_paths()
    if os.name == "posix" and paths.cafile is not None:
        os.environ.setdefault(paths.openssl_cafile_env, paths.cafile)
