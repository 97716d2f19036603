"""Artefacts on this node's disk: fetched, verified against the hub's signature, seeded, removed.

They come through the swarm; what the hub on this very host holds in memory is read from there, and verified the same.

An artefact counts only when its marker, `<name>.verified` beside its directory, names the signed manifest and every
file still has the size and time it had when it was hashed. The marker is written last and deleted first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.net.address import HubAddress
from echo_shared import artefacts, shared_memory
from echo_shared.artefacts import Manifest
from echo_shared.errors import RemoteProtocolError, StorageError, SwarmError
from echo_shared.messages import ArtefactOffer, Fetched, SharedMemory
from echo_shared.swarm import Swarm, read_torrent
from echo_shared.swarm.base import OnProgress, storage_error

log = logging.getLogger(__name__)

MARKER_SUFFIX: Final = ".verified"
_CONTENT_DIGITS: Final = 32
MOST_HEADROOM_BYTES: Final = 256 * 2**20
HEADROOM_SHARE: Final = 0.05
"""What a fetch leaves free: this share of the disk, or MOST_HEADROOM_BYTES if that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The hub and run that artefacts come from."""

    address: HubAddress
    hub_key: bytes
    run_id: str
    tracker_path: str


class Fetcher:
    """One run's artefacts below one directory. Each artefact is fetched by at most one task at a time."""

    def __init__(self, swarm: Swarm, directory: Path, source: Source) -> None:
        self._swarm = swarm
        self._directory = directory
        self._source = source
        self._trackers = (source.address.url(source.tracker_path),)
        self._info_hashes: dict[int | None, bytes] = {}
        self._base: Manifest | None = None

    def directory(self, policy_version: int | None) -> Path:
        """Where the artefact lies, or will lie; None = the base model."""
        run_id = self._source.run_id
        if policy_version is None:
            return self._directory / artefacts.artefact_name("base", run_id, 0)
        return self._directory / artefacts.artefact_name("policy", run_id, policy_version)

    @property
    def base_content(self) -> str:
        """Names the base model that is here by what is in it; 32 hexadecimal characters."""
        assert self._base is not None, "the base has not been fetched"
        return self._base.sha256[:_CONTENT_DIGITS]

    async def fetch(
        self, offer: ArtefactOffer, policy_version: int | None, *, on_progress: OnProgress | None = None
    ) -> Fetched | None:
        """Makes the artefact complete, verified and seeded; None when it was on disk already.

        Raises RemoteProtocolError when the offer is not the hub's or not for this artefact, SwarmError when nobody
        serves it or its files are wrong, StorageError. Cancel-safe: what has arrived is kept for the next call.
        """
        manifest = self._open(offer, policy_version)
        self._info_hashes[policy_version] = bytes.fromhex(manifest.info_hash)
        directory = self._directory / manifest.name
        if policy_version is None:
            self._base = manifest
        if await asyncio.to_thread(_is_marked, directory, manifest):
            await self._swarm.seed(offer.torrent, directory, self._trackers)
            return None
        await asyncio.to_thread(_clear_marked, directory)
        await asyncio.to_thread(_check_room, directory, manifest)
        fetched = await self._from_memory(offer, manifest)
        if fetched is None:
            fetched = await self._through_swarm(offer, manifest, on_progress)
        await asyncio.to_thread(_mark, directory, manifest)
        return fetched

    async def _from_memory(self, offer: ArtefactOffer, manifest: Manifest) -> Fetched | None:
        """None when the artefact, as the hub signed it, cannot be read from this host's memory."""
        if offer.shared_memory is None:
            return None
        directory, started_at = self._directory / manifest.name, time.monotonic()
        reading = asyncio.ensure_future(asyncio.to_thread(_read_from_memory, offer.shared_memory, manifest, directory))
        try:
            is_here = await asyncio.shield(reading)
        finally:
            await asyncio.wait({reading})  # A thread cannot be cancelled, and what comes next may delete its files.
        if not is_here:
            return None
        seconds = time.monotonic() - started_at
        await self._swarm.seed(offer.torrent, directory, self._trackers)
        return Fetched(
            info_hash=bytes.fromhex(manifest.info_hash),
            policy_version=manifest.policy_version or None,
            seconds=seconds,
            swarm_bytes=0,
            web_seed_bytes=0,
            shared_memory_bytes=manifest.total_bytes,
        )

    async def _through_swarm(self, offer: ArtefactOffer, manifest: Manifest, on_progress: OnProgress | None) -> Fetched:
        info_hash = bytes.fromhex(manifest.info_hash)
        stats = await self._swarm.fetch(
            offer.torrent,
            self._directory,
            peers=offer.peers,
            tracker_urls=self._trackers,
            web_seed_url=self._source.address.url(offer.web_seed_path),
            on_progress=on_progress,
        )
        try:
            await asyncio.to_thread(_verify, manifest, self._directory / manifest.name)
        except SwarmError:
            await self._swarm.remove(info_hash, delete_files=True)
            raise
        return Fetched(
            info_hash=info_hash,
            policy_version=manifest.policy_version or None,
            seconds=stats.seconds,
            swarm_bytes=stats.swarm_bytes,
            web_seed_bytes=stats.web_seed_bytes,
        )

    async def remove(self, policy_version: int) -> None:
        """Stops seeding or fetching this version and deletes what is there of it.

        What cannot be deleted now, say because a virus scanner reads it, is left to `delete_leftovers`.
        """
        info_hash = self._info_hashes.pop(policy_version, None)
        if info_hash is not None:
            await self._swarm.remove(info_hash)
        await asyncio.to_thread(_try_to_delete, self.directory(policy_version))

    def delete_leftovers(self, keep_version: int) -> None:
        """Deletes this run's other versions, left by an earlier process, as far as the disk allows. Blocks."""
        for directory in self._leftovers(keep_version):
            _try_to_delete(directory)

    def _leftovers(self, keep_version: int) -> list[Path]:
        kept = self.directory(keep_version).name
        of_this_run = re.compile(re.escape(self.directory(0).name.rstrip("0")) + r"\d+")
        directories = (path for path in self._directory.glob("*") if path.is_dir())
        return [path for path in directories if of_this_run.fullmatch(path.name) and path.name != kept]

    def _open(self, offer: ArtefactOffer, policy_version: int | None) -> Manifest:
        """The manifest; the hub signed it, and it and the torrent are for this artefact and no other."""
        manifest = artefacts.open_offer(offer, self._source.hub_key)
        wanted = (self.directory(policy_version).name, self._source.run_id, policy_version or 0)
        if (manifest.name, manifest.run_id, manifest.policy_version) != wanted:
            raise RemoteProtocolError("The hub offers one artefact as another.", got=f"{manifest.name} for {wanted[0]}")
        layout = read_torrent(offer.torrent)
        files = tuple((file.path, file.size_bytes) for file in manifest.files)
        if layout.info_hash.hex() != manifest.info_hash or layout.name != manifest.name:
            raise RemoteProtocolError("A torrent is not the one in the signed manifest.", got=layout.info_hash.hex())
        if sorted(layout.files) != sorted(files):
            raise RemoteProtocolError("A torrent's files are not those of its manifest.", got=manifest.name)
        return manifest


def content_here(directory: Path) -> str | None:
    """As `Fetcher.base_content`, of an artefact that lies here verified and unchanged; None where there is none."""
    try:
        marker = json.loads(_marker(directory).read_text(encoding="utf-8"))
        for path, (size_bytes, mtime_ns) in marker["files"].items():
            stat = (directory / path).stat()
            if (stat.st_size, stat.st_mtime_ns) != (size_bytes, mtime_ns):
                return None
        return str(marker["manifest"])[:_CONTENT_DIGITS]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def delete_artefact(directory: Path) -> None:
    """Deletes an artefact, its marker first. Raises StorageError."""
    with _on_disk(directory):
        _marker(directory).unlink(missing_ok=True)
        if directory.exists():
            shutil.rmtree(directory)


def _try_to_delete(directory: Path) -> None:
    try:
        delete_artefact(directory)
    except StorageError as error:
        log.warning("%s is not deleted yet: %s", directory.name, error)


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    """The disk's refusals as StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(str(error), code=error.errno, path=path) from error


def _check_room(directory: Path, manifest: Manifest) -> None:
    """Raises StorageError when what is missing of the artefact does not fit on the disk."""
    with _on_disk(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        here_bytes = sum(_allocated_bytes(directory / file.path) for file in manifest.files)
        disk = shutil.disk_usage(directory.parent)
    missing_bytes = manifest.total_bytes - here_bytes
    usable_bytes = disk.free - headroom_bytes(disk.total)
    if missing_bytes > max(0, usable_bytes):
        raise StorageError(
            f"The disk is full: {directory.name} does not fit on it.",
            got=f"{missing_bytes / 2**20:,.0f} MiB to fetch, {disk.free / 2**20:,.0f} MiB free",
            do=f"Free some space on the disk of {directory.parent}, or use another disk: --data-dir DIR",
        )


def headroom_bytes(disk_bytes: int) -> int:
    """What is left free of a disk of this size."""
    return min(MOST_HEADROOM_BYTES, int(HEADROOM_SHARE * disk_bytes))


def _allocated_bytes(path: Path) -> int:
    """What the file takes of the disk: a fetch under way may have its full size, and holes."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    blocks: int | None = getattr(found, "st_blocks", None)  # Windows does not say.
    return found.st_size if blocks is None else min(found.st_size, 512 * blocks)


def _read_from_memory(address: SharedMemory, manifest: Manifest, directory: Path) -> bool:
    """Whether all of the artefact is in `directory` then, with the signed hashes. Blocks."""
    try:
        shared_memory.read(address, manifest, directory)
        artefacts.verify_files(manifest, directory)
    except (OSError, SwarmError) as error:
        log.debug("%s is not read from the hub's memory: %s", manifest.name, error)
        return False
    return True


def _verify(manifest: Manifest, directory: Path) -> None:
    with _on_disk(directory):
        artefacts.verify_files(manifest, directory)


def _marker(directory: Path) -> Path:
    return directory.with_name(directory.name + MARKER_SUFFIX)


def _fingerprint(directory: Path, manifest: Manifest) -> str:
    """The signed manifest, and each file's size and time as they are now."""
    stats = [(file.path, (directory / file.path).stat()) for file in manifest.files]
    files = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats}
    return json.dumps({"manifest": manifest.sha256, "files": files}, sort_keys=True)


def _is_marked(directory: Path, manifest: Manifest) -> bool:
    try:
        return _marker(directory).read_text(encoding="utf-8") == _fingerprint(directory, manifest)
    except (OSError, UnicodeDecodeError):
        return False


def _mark(directory: Path, manifest: Manifest) -> None:
    marker = _marker(directory)
    temporary = marker.with_suffix(".tmp")
    with _on_disk(marker):
        temporary.write_text(_fingerprint(directory, manifest), encoding="utf-8")
        temporary.replace(marker)


def _clear_marked(directory: Path) -> None:
    """Something else was complete here, or was changed since: start anew. Without a marker it is a partial fetch."""
    if _marker(directory).exists():
        log.warning("%s has changed since it was verified: it is fetched again.", directory.name)
        delete_artefact(directory)
