"""Fetches artefacts for this node, and serves and removes them. Each artefact is decrypted, decoded, and verified
against the hub's signature.

If the hub runs on this host, an artefact may be read from the hub's shared memory. A base model may come from a model
hub, such as Hugging Face. All other artefacts come in a carrier (their encrypted copy), by the transport that the hub
offers: pushed piece by piece, through the swarm, or from the hub's web seed. If a push falls silent, the swarm fetches
the pieces that are missing. The swarm uses the web seed by itself.

The carrier is unpacked into the artefact's files, which count once their marker is written
(`echo_node.host.artefact_files`). The carrier of a policy version is kept, to serve other nodes. The carrier of a base
model has the model's size, so serving it ends with the download, when the marker is written.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from echo_node.core.policies import KEPT, OnDisk
from echo_node.host.address import HubAddress
from echo_node.host.artefact_files import (
    CONTENT_DIGITS,
    check_room,
    delete_artefact,
    delete_changed,
    read_marker,
    try_to_delete,
    write_marker,
)
from echo_node.host.base_forms import conversion_bytes, size_of
from echo_node.host.traffic import TrafficMeter
from echo_node.net import model_hub
from echo_node.net.carriers import Carriers
from echo_node.net.receiver import NOTHING, Received, Receiver
from echo_shared import delta
from echo_shared.artefacts import hashed_files, sealing
from echo_shared.artefacts import manifest as artefacts
from echo_shared.artefacts.manifest import PAYLOAD_NAME, SEALED_SUFFIX, Manifest
from echo_shared.errors import CodecError, EchoError, RemoteProtocolError, SwarmError
from echo_shared.files.atomic import Readable
from echo_shared.process.threads import in_thread
from echo_shared.swarm import Swarm, read_torrent, shared_memory
from echo_shared.swarm.base import OnProgress
from echo_shared.swarm.disk import on_disk
from echo_shared.swarm.piece_file import GIVEN_UP, ArrivingFile, PieceFile
from echo_shared.swarm.torrent import TorrentLayout
from echo_shared.wire.messages import ArtefactOffer, Fetched, RunKeys, SharedMemory, Way

log = logging.getLogger(__name__)

SILENCE_S: Final = 3.0
"""Seconds without a new piece after which a push continues through the swarm."""
UNREADABLE: Final = "unreadable"
"""Code of the SwarmError for a complete carrier (the encrypted files) that does not decode to the files that the hub
has signed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Hub and run from which artefacts come."""

    address: HubAddress
    hub_key: bytes
    run_id: str
    tracker_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One artefact to fetch: offer, manifest, and the torrent layout of its carrier (encrypted files)."""

    offer: ArtefactOffer
    manifest: Manifest
    layout: TorrentLayout
    on_progress: OnProgress

    def fetched(
        self,
        *,
        seconds: float,
        swarm_bytes: int = 0,
        web_seed_bytes: int = 0,
        shared_memory_bytes: int = 0,
        pushed_bytes: int = 0,
        mesh_bytes: int = 0,
        model_hub_bytes: int = 0,
    ) -> Fetched:
        """Return the message that tells the hub how the artefact was fetched."""
        return Fetched(
            info_hash=self.layout.info_hash,
            policy_version=self.manifest.policy_version or None,
            seconds=seconds,
            swarm_bytes=swarm_bytes,
            web_seed_bytes=web_seed_bytes,
            shared_memory_bytes=shared_memory_bytes,
            pushed_bytes=pushed_bytes,
            mesh_bytes=mesh_bytes,
            model_hub_bytes=model_hub_bytes,
        )


class Fetcher:
    """One run's artefacts, and their carriers (encrypted files). At most one task at a time may fetch a given
    artefact.
    """

    def __init__(
        self,
        swarm: Swarm,
        receiver: Receiver,
        source: Source,
        *,
        artefacts: Path,
        carriers: Path,
        meter: TrafficMeter | None = None,
        backend: str = "",
        precision: str = "auto",
    ) -> None:
        """`meter` counts the bytes that come from a model hub. A base model is fetched only if the disk also has space
        for its conversion by `backend` at `precision` (`conversion_bytes`).
        """
        self._swarm = swarm
        self._receiver = receiver
        self._source = source
        self._directory = artefacts
        self._meter = meter
        self._backend = backend
        self._precision = precision
        self._trackers = (source.address.url(source.tracker_path),)
        self._carriers = Carriers(swarm, carriers, self._trackers)
        self._keys: dict[int, bytes] = {}
        self._under_way: dict[int | None, asyncio.Event] = {}
        """Event for each running fetch, set when the fetch ends, by version."""
        self._base: Manifest | None = None
        self._base_manifest = b""
        """Bytes of the manifest `_base`, as the hub has signed them."""
        self._unpacking: dict[int | None, Manifest] = {}
        """Artefacts whose complete carriers are being decrypted and verified."""

    @property
    def unpacking(self) -> dict[int | None, tuple[int, int]]:
        """(bytes decrypted and verified, total bytes) of complete carriers, by version; None = the base model."""
        return {version: self._unpacked(manifest) for version, manifest in self._unpacking.items()}

    def _unpacked(self, manifest: Manifest) -> tuple[int, int]:
        directory = self._directory / manifest.name
        return sum(size_of(directory / file.path) for file in manifest.files), manifest.total_bytes

    def set_keys(self, run_keys: RunKeys) -> None:
        self._keys = {one.key_id: one.key for one in run_keys}

    def directory(self, policy_version: int | None) -> Path:
        """Return the artefact's directory, which may not exist yet. None means the base model."""
        run_id = self._source.run_id
        if policy_version is None:
            return self._directory / artefacts.artefact_name("base", run_id, 0)
        return self._directory / artefacts.artefact_name("policy", run_id, policy_version)

    @property
    def base_content(self) -> str:
        """Id of the fetched base model's content: 32 hexadecimal characters."""
        assert self._base is not None, "the base has not been fetched"
        return self._base.content[:CONTENT_DIGITS]

    def is_withdrawn(self, gguf: ArtefactOffer | None) -> bool:
        """Return True if this node's base model is a GGUF file, and the hub offers another file or none. `gguf`: the
        file that the hub offers now.
        """
        if self._base is None or self._base.carrier != "gguf":
            return False
        return gguf is None or gguf.manifest != self._base_manifest

    async def fetch(
        self, offer: ArtefactOffer, policy_version: int | None, *, on_progress: OnProgress = lambda done, total: None
    ) -> Fetched:
        """Fetch and verify the artefact, unless it is on disk, and return how it was fetched. Call `share` next.

        `on_progress` gets counts of transferred bytes. Raises RemoteProtocolError if the offer is not signed by the hub
        or names another artefact; SwarmError if no peer serves the artefact or its files are wrong (`UNREADABLE`: a
        keyframe is needed); StorageError for disk errors. Cancel-safe: the next call uses the pieces that have arrived.
        """
        job = self._open(offer, policy_version, on_progress)
        manifest, directory = job.manifest, self._directory / job.manifest.name
        if policy_version is None:
            self._base, self._base_manifest = manifest, offer.manifest
        verified = await asyncio.to_thread(read_marker, directory)
        if verified is not None and verified.content == manifest.content:
            return verified.fetched
        ended = self._under_way[policy_version] = asyncio.Event()
        try:
            fetched = await self._bring(job)
            await asyncio.to_thread(write_marker, directory, manifest, fetched)
            if policy_version is None:
                await self._carriers.discard(manifest.carrier_name)
        finally:
            ended.set()
            del self._under_way[policy_version]
        log.info("%s came in %.1f s.", manifest.name, fetched.seconds)
        return fetched

    async def share(self, offer: ArtefactOffer, fetched: Fetched) -> None:
        """Serve the carrier (the encrypted files) of a fetched policy version to other nodes, if the version came in a
        carrier.

        Raises RemoteProtocolError, SwarmError or StorageError; the carrier is then deleted.
        """
        manifest, layout = artefacts.open_offer(offer, self._source.hub_key), read_torrent(offer.torrent)
        came_otherwise = fetched.shared_memory_bytes or fetched.model_hub_bytes
        # No carrier was used, or the carrier's files on disk may be incomplete.
        if came_otherwise or fetched.info_hash != layout.info_hash:
            return
        try:
            await self._carriers.serve(manifest, layout)
            await self._carriers.settle(manifest, layout)
        except EchoError:
            await self._carriers.discard(manifest.carrier_name)
            raise

    async def _bring(self, job: _Job) -> Fetched:
        manifest, directory = job.manifest, self._directory / job.manifest.name
        files = [(directory / file.path, file.size_bytes) for file in manifest.files]
        await asyncio.to_thread(delete_changed, directory)
        more_bytes = 0
        if manifest.kind == "base":
            await self._carriers.discard_other_forms(manifest)
        if manifest.carrier == "files":
            more_bytes = conversion_bytes(manifest.total_bytes, backend=self._backend, precision=self._precision)
        await asyncio.to_thread(check_room, self._directory, manifest.name, files, more_bytes=more_bytes)
        fetched = await self._from_memory(job) or await self._from_model_hub(job)
        if fetched is not None:
            # Discard the carrier: otherwise its incomplete files could later be taken for complete ones.
            await self._carriers.discard(manifest.carrier_name)
            return fetched
        carrier = self._carriers.path(manifest)
        files += [(carrier / path, size_bytes) for path, size_bytes in job.layout.files]
        await asyncio.to_thread(check_room, self._carriers.directory, manifest.name, files)
        await self._carriers.begin(job.layout)
        try:
            return await self._through_network(job, carrier)
        except SwarmError as error:
            if error.code == UNREADABLE:
                await self._carriers.discard(manifest.carrier_name)
            raise

    async def _from_memory(self, job: _Job) -> Fetched | None:
        """Read the artefact from the hub's shared memory. Return None if that fails."""
        address = job.offer.shared_memory
        if address is None:
            return None
        started_at = time.monotonic()
        directory = self._directory / job.manifest.name
        if not await in_thread(partial(_read_from_memory, address, job.manifest, directory)):
            return None
        seconds = time.monotonic() - started_at
        return job.fetched(seconds=seconds, shared_memory_bytes=job.manifest.total_bytes)

    async def _from_model_hub(self, job: _Job) -> Fetched | None:
        """Download the base model from a model hub. Return None if the offer names no model hub, or if the download
        fails.
        """
        manifest = job.manifest
        if manifest.source is None:
            return None
        started_at, loop, stop, here_bytes = time.monotonic(), asyncio.get_running_loop(), threading.Event(), 0

        def count(more_bytes: int) -> None:
            nonlocal here_bytes
            here_bytes += more_bytes
            if stop.is_set():
                raise SwarmError(f"The download of {manifest.source} was stopped.")
            if self._meter is not None:
                loop.call_soon_threadsafe(partial(self._meter.count, received=more_bytes))
            loop.call_soon_threadsafe(job.on_progress, min(here_bytes, manifest.total_bytes), manifest.total_bytes)

        log.info("The base model comes from a model hub: %s.", manifest.source)
        download = partial(model_hub.download, manifest, self._directory / manifest.name, count)
        try:
            await in_thread(download, stop=stop)
        except SwarmError as error:
            log.warning("%s The swarm takes over. (%s)", error.what, error.got)
            return None
        return job.fetched(seconds=time.monotonic() - started_at, model_hub_bytes=manifest.total_bytes)

    async def _through_network(self, job: _Job, carrier: Path) -> Fetched:
        """Fetch the carrier (the artefact's encrypted files) by the offered transport, or through the swarm after a
        failure, and unpack it.
        """
        manifest, offer = job.manifest, job.offer
        job.on_progress(0, job.layout.total_bytes)
        received, unpacked, swarm_bytes, web_seed_bytes, seconds = NOTHING, False, 0, 0, 0.0
        if offer.way in (Way.INLINE, Way.BROADCAST):
            pieces = await self._receiver.expect(offer.torrent, self._carriers.directory)
            unpacked = not manifest.in_files
            received = await (self._receive_unpacking(job, pieces) if unpacked else self._receive(job))
            seconds = received.seconds
        if not received.complete:
            by_web_seed = offer.way is Way.WEB_SEED
            stats = await self._swarm.fetch(
                offer.torrent,
                self._carriers.directory,
                peers=() if by_web_seed else offer.peers,
                tracker_urls=() if by_web_seed else self._trackers,
                web_seed_url=self._source.address.url(offer.web_seed_path),
                on_progress=job.on_progress,
            )
            swarm_bytes, web_seed_bytes, seconds = stats.swarm_bytes, stats.web_seed_bytes, seconds + stats.seconds
        if not (received.complete and unpacked):
            await self._unpack(job, carrier)
        return job.fetched(
            seconds=seconds,
            swarm_bytes=swarm_bytes,
            web_seed_bytes=web_seed_bytes,
            pushed_bytes=received.pushed_bytes,
            mesh_bytes=received.mesh_bytes,
        )

    async def _receive(self, job: _Job) -> Received:
        """Receive pieces that the hub pushes and other nodes forward."""
        received = await self._receiver.wait(job.layout.info_hash, silence_s=SILENCE_S, on_progress=job.on_progress)
        if not received.complete:
            log.info("The push of %s has fallen silent. The swarm takes over.", job.layout.name)
        return received

    async def _receive_unpacking(self, job: _Job, pieces: PieceFile) -> Received:
        """Receive pieces like `_receive`, and unpack them as they arrive, so that the artefact is ready soon after the
        last piece.
        """
        arriving = ArrivingFile(pieces)
        unpacking = asyncio.create_task(self._unpack(job, arriving))
        try:
            received = await self._receive(job)
            if received.complete:
                await unpacking
            return received
        finally:
            pieces.give_up()
            await asyncio.wait({unpacking})
            arriving.close()
            if not unpacking.cancelled() and (error := unpacking.exception()) is not None:
                log.debug("%s was not unpacked: %s", job.manifest.name, error)

    async def _unpack(self, job: _Job, source: Path | ArrivingFile) -> None:
        """Write the artefact's files from a complete carrier or an arriving payload, and verify them. Raises
        SwarmError, StorageError.
        """
        manifest = job.manifest
        key = self._keys.get(manifest.key_id)
        if key is None:
            raise SwarmError(
                f"{manifest.name} is sealed with a key that this node does not have.",
                got=f"key {manifest.key_id} of the run",
                do="The hub sends its nodes each new key. If this repeats, ask the hub's operator.",
            )
        parent = None
        if manifest.delta_parent is not None:
            parent = self.directory(manifest.delta_parent)
            if (coming := self._under_way.get(manifest.delta_parent)) is not None:
                await coming.wait()
            if await asyncio.to_thread(read_marker, parent) is None:
                raise _unreadable(manifest, f"a delta against version {manifest.delta_parent}, which is not here")
        directory = self._directory / manifest.name
        version = None if manifest.kind == "base" else manifest.policy_version
        if isinstance(source, Path):
            self._unpacking[version] = manifest
        try:
            await in_thread(partial(_make_verified, manifest, source, directory, key, parent))
        finally:
            self._unpacking.pop(version, None)

    async def close(self) -> None:
        """Stop serving, so that all files can be deleted."""
        await self._carriers.stop_serving()

    async def unwanted(self, info_hashes: Iterable[bytes]) -> None:
        """Stop serving these carriers (encrypted files), which no node fetches any more, and delete them."""
        await self._carriers.unwanted(info_hashes)

    async def abandon(self, policy_version: int) -> None:
        """Delete all files of a version whose fetch has ended."""
        await self._carriers.discard_of(self.directory(policy_version).name)
        await self.remove(policy_version)

    async def remove(self, policy_version: int) -> None:
        """Delete a version's files. Its carrier (the encrypted files) is still served. Files that cannot be deleted
        now, for example because a virus scanner reads them, are left to `take_up`.
        """
        await asyncio.to_thread(try_to_delete, self.directory(policy_version))

    def take_up(self, newest_version: int) -> dict[int, OnDisk]:
        """Return this run's newest verified versions from before a restart. Blocks the calling thread.

        All other versions are deleted, as far as the disk allows. So are all carriers except those of the newest
        version and of an incomplete base model, whose fetch can resume.
        """
        prefix = self.directory(0).name.rstrip("0")
        found: dict[int, OnDisk] = {}
        for path in self._directory.glob(f"{prefix}*"):
            digits = path.name.removeprefix(prefix)
            if path.is_dir() and digits.isdecimal():
                verified = read_marker(path, hash_again=True) if int(digits) <= newest_version else None
                if verified is None:
                    try_to_delete(path)
                else:
                    found[int(digits)] = verified
        for version in sorted(found)[:-KEPT]:
            try_to_delete(self.directory(version))
            del found[version]
        base, newest = self.directory(None), self.directory(newest_version).name
        of_run = re.compile(f"{re.escape(prefix)}\\d+|{re.escape(base.name)}")
        self._carriers.delete_leftovers(of_run, [newest] if read_marker(base) else [newest, base.name])
        return found

    def _open(self, offer: ArtefactOffer, policy_version: int | None, on_progress: OnProgress) -> _Job:
        """Check that the hub signed the manifest, and that manifest and torrent belong to the requested artefact."""
        manifest = artefacts.open_offer(offer, self._source.hub_key)
        wanted = (self.directory(policy_version).name, self._source.run_id, policy_version or 0)
        if (manifest.name, manifest.run_id, manifest.policy_version) != wanted:
            raise RemoteProtocolError("The hub offers one artefact as another.", got=f"{manifest.name} for {wanted[0]}")
        layout = read_torrent(offer.torrent)
        if layout.info_hash.hex() != manifest.info_hash or layout.name != manifest.carrier_name:
            raise RemoteProtocolError("A torrent is not the one in the signed manifest.", got=layout.info_hash.hex())
        sealed = [f"{file.path}{SEALED_SUFFIX}" for file in manifest.files]
        if sorted(path for path, _ in layout.files) != sorted(sealed if manifest.in_files else [PAYLOAD_NAME]):
            raise RemoteProtocolError("A torrent's files are not those of its manifest.", got=manifest.name)
        if manifest.delta_parent is not None and manifest.delta_parent >= manifest.policy_version:
            raise RemoteProtocolError("A delta is against a later version.", got=layout.name)
        return _Job(offer=offer, manifest=manifest, layout=layout, on_progress=on_progress)


def _decode(
    manifest: Manifest, payload: Readable, directory: Path, key: bytes, parent: Path | None
) -> Mapping[str, str]:
    """Decrypt and decode a payload into the artefact's files. Blocks the calling thread, also for data that has not
    arrived yet.
    """
    files = {file.path: file.size_bytes for file in manifest.files}
    return delta.decode(sealing.UnsealingReader(payload, key), directory, files=files, parent=parent)


def _make(
    manifest: Manifest, source: Path | ArrivingFile, directory: Path, key: bytes, parent: Path | None
) -> Mapping[str, str]:
    """Write the artefact's files, and return their hashes, computed while writing. `source`: see `Fetcher._unpack`.
    Blocks the calling thread.
    """
    if not isinstance(source, Path):
        return _decode(manifest, source, directory, key, parent)
    if manifest.in_files:
        paths = [file.path for file in manifest.files]
        return {path: sealing.unseal(source / f"{path}{SEALED_SUFFIX}", directory / path, key) for path in paths}
    with on_disk(source), (source / PAYLOAD_NAME).open("rb") as payload:
        return _decode(manifest, payload, directory, key, parent)


def _make_verified(
    manifest: Manifest, source: Path | ArrivingFile, directory: Path, key: bytes, parent: Path | None
) -> None:
    """Write the artefact's files into `directory` and verify their hashes. Blocks the calling thread.

    Raises SwarmError with the code `UNREADABLE`, or StorageError; `directory` is then deleted.
    """
    delete_artefact(directory)
    try:
        artefacts.verify_hashes(manifest, _make(manifest, source, directory, key, parent))
    except (CodecError, SwarmError) as error:
        delete_artefact(directory)
        if error.code == GIVEN_UP:
            raise
        raise _unreadable(manifest, f"{error.what} ({error.got})") from error


def _unreadable(manifest: Manifest, got: str) -> SwarmError:
    return SwarmError(
        f"{manifest.name} is complete, but cannot be read.",
        got=got,
        do="The node fetches it again by itself; if this repeats, tell the hub's operator.",
        code=UNREADABLE,
    )


def _read_from_memory(address: SharedMemory, manifest: Manifest, directory: Path) -> bool:
    """Read the artefact from shared memory into `directory`. Return True if the artefact is complete and has the signed
    hashes. Blocks the calling thread.
    """
    try:
        shared_memory.read(address, manifest, directory)
        hashed_files.verify_files(manifest, directory)
    except (OSError, SwarmError) as error:
        log.debug("%s is not read from the hub's memory: %s", manifest.name, error)
        return False
    return True
