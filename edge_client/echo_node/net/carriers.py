"""Carriers on this node's disk: the encrypted files of artefacts, which the node serves to other nodes.

The node serves the carriers of at most the newest `SERVED` policy versions, even if the hub asks for more. A base
model's carrier is served only during its download.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from echo_node.host.artefact_files import try_to_delete
from echo_shared.artefacts.manifest import Manifest
from echo_shared.swarm import Swarm
from echo_shared.swarm.disk import on_disk
from echo_shared.swarm.torrent import TorrentLayout

SERVED: Final = 8


class Carriers:
    """One run's carriers (the encrypted files of artefacts), by name, below one directory."""

    def __init__(self, swarm: Swarm, directory: Path, tracker_urls: Iterable[str]) -> None:
        self.directory = directory
        self._swarm = swarm
        self._trackers = tuple(tracker_urls)
        self._info_hashes: dict[str, bytes] = {}
        """BitTorrent info-hash of each carrier that arrives or is served, by the carrier's name."""
        self._served: dict[str, int] = {}
        """Policy versions of the carriers that the node keeps only for other nodes (see `settle`), by the carrier's
        name.
        """
        self._unwanted: frozenset[bytes] = frozenset()
        """Info-hashes of carriers that no other node needs, according to the hub's last message. Carriers whose fetch
        began after that message are left out.
        """

    def path(self, manifest: Manifest) -> Path:
        return self.directory / manifest.carrier_name

    async def begin(self, layout: TorrentLayout) -> None:
        """Prepare for the pieces of this carrier. Deletes a carrier of the same name from another torrent."""
        if self._info_hashes.get(layout.name, layout.info_hash) != layout.info_hash:
            await self.discard(layout.name)
        self._info_hashes[layout.name] = layout.info_hash
        self._served.pop(layout.name, None)  # Until `settle`, this node itself needs the carrier again.
        self._unwanted -= {layout.info_hash}

    async def serve(self, manifest: Manifest, layout: TorrentLayout) -> None:
        """Serve a complete carrier to other nodes. No effect if its files are gone."""
        with on_disk(self.path(manifest)):
            is_here = await asyncio.to_thread(layout.fits, self.path(manifest))
        if is_here:
            self._info_hashes[layout.name] = layout.info_hash
            await self._swarm.seed(layout.torrent, self.path(manifest), self._trackers)

    async def settle(self, manifest: Manifest, layout: TorrentLayout) -> None:
        """Record that this node has unpacked a policy version's carrier (its encrypted files). From now on, the carrier
        is kept only for other nodes.
        """
        if layout.name not in self._info_hashes:
            return
        if layout.info_hash in self._unwanted:
            await self.discard(layout.name)
            return
        self._served[layout.name] = manifest.policy_version
        served = sorted((version, name) for name, version in self._served.items())
        for _, name in served[:-SERVED]:
            await self.discard(name)

    async def unwanted(self, info_hashes: Iterable[bytes]) -> None:
        """Stop serving these carriers (encrypted files of artefacts), which no other node fetches. A carrier that this
        node still uses stays until `settle`.
        """
        self._unwanted = frozenset(info_hashes)
        for name in [name for name in self._served if self._info_hashes[name] in self._unwanted]:
            await self.discard(name)

    async def stop_serving(self) -> None:
        """Stop serving all carriers (encrypted files), but leave their files in place."""
        for info_hash in self._info_hashes.values():
            await self._swarm.remove(info_hash)
        self._info_hashes.clear()
        self._served.clear()

    async def discard(self, name: str) -> None:
        """Stop fetching or serving a carrier, and delete its files, now or at the next start."""
        self._served.pop(name, None)
        info_hash = self._info_hashes.pop(name, None)
        if info_hash is not None:
            await self._swarm.remove(info_hash)
        await asyncio.to_thread(try_to_delete, self.directory / name)

    async def discard_other_forms(self, manifest: Manifest) -> None:
        """Delete the carriers of the base model's other form (weights or GGUF file), which `manifest` does not
        describe.
        """
        for path in self.directory.glob(f"{manifest.name}.*"):
            if path.name != manifest.carrier_name and path.is_dir():
                await self.discard(path.name)

    async def discard_of(self, artefact: str) -> None:
        for name in [name for name in self._info_hashes if _artefact_of(name) == artefact]:
            await self.discard(name)

    def delete_leftovers(self, of_run: re.Pattern[str], keep: Iterable[str]) -> None:
        """Delete carriers (encrypted files) that an earlier process left, except those of the artefacts in `keep`.
        Blocks the calling thread.
        """
        kept = set(keep)
        for path in self.directory.glob("*"):
            artefact = _artefact_of(path.name)
            if of_run.fullmatch(artefact) and artefact not in kept and path.is_dir():
                try_to_delete(path)


def _artefact_of(name: str) -> str:
    """Return the name of a carrier's artefact, which is its name without the suffix."""
    return name.rpartition(".")[0]
