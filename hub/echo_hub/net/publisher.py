"""Publishing: turns the base model and every policy version into signed, sealed artefacts, and seeds them.

A policy version is published once as what is smallest, a delta or a keyframe; its keyframe is made as well when a node
asks for it. What is published keeps its info-hash and its signature over any number of restarts, while it is among the
newest KEPT_VERSIONS, twice as many while nodes still fetch them: an older one that an evaluation uses is removed when
the hub starts, and sealed anew when it is used again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_hub.core.training import KEPT_VERSIONS
from echo_hub.net.artefact_store import ArtefactStore, Carrier
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.tracker import Tracker
from echo_hub.run.directory import RunDirectory
from echo_hub.run.keys import RunKeys
from echo_shared.artefacts import sign_offer
from echo_shared.errors import SwarmError
from echo_shared.identity import Identity
from echo_shared.messages import ArtefactOffer, RunKey, Way
from echo_shared.swarm import Swarm

WEB_SEED_PATH: Final = "/artefacts/"
"""Where `echo_hub.net.artefact_routes` serves what is published; the node's passkey, the carrier's name and the file's
path follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    carrier: Carrier
    offer: ArtefactOffer
    """The offer without what differs from node to node."""


class Publisher:
    """All that this run has published. Version 0 is the base model. Call `reopen` first."""

    _keys: RunKeys

    def __init__(
        self, run_dir: Path, run_id: str, hub: Identity, *, swarm: Swarm, tracker: Tracker, memory: HostMemory
    ) -> None:
        self._directory = RunDirectory(run_dir)
        self._store = ArtefactStore(self._directory.artefacts, run_id)
        self._hub = hub
        self._swarm = swarm
        self._tracker = tracker
        self._memory = memory
        self._kept = 0
        self._publishing = asyncio.Lock()
        self._published: dict[int, list[_Published]] = {}
        """By version, each with its carriers; the one that was made first is its delta, if it has one."""

    async def reopen(self) -> None:
        """Seeds again what was published before, and clears away what was only half published."""
        self._keys = await asyncio.to_thread(RunKeys.open, self._directory.run_keys)
        for carrier in await asyncio.to_thread(self._store.read_all, self._keys.ids):
            await self._swarm.seed(carrier.torrent, carrier.directory)
            self._register(carrier)
        await self._retire()

    async def publish_base(self, model_dir: Path, *, source: str | None = None) -> None:
        """Signs and seeds the base model in `model_dir` (Hugging Face layout), sealed; at once when that has been done.

        `source`: its id and revision on the model hub, where nodes are to get it. Raises ConfigError when there are no
        safetensors weights, StorageError.
        """
        async with self._publishing:
            if 0 not in self._published:
                await self._publish(lambda key: self._store.make_base(model_dir, key, source=source))
            elif (base := self.carrier(0)).manifest.source != source:
                base = await asyncio.to_thread(self._store.say_source, base, source)
                self._published[0] = [self._signed(base)]

    async def publish_policy(
        self, version: int, adapter_dir: Path, *, delta_parent: int | None = None, in_use: Collection[int] = ()
    ) -> None:
        """Signs and seeds the PEFT adapter in `adapter_dir`; at once when this version is published already.

        So a hub that calls it at start, after `reopen`, for the version that its store says is published has that
        version back even when its artefact was damaged. It is sent as its difference from version `delta_parent`, if
        that is still published and the difference is smaller. Versions `in_use` are retired later than others. Raises
        StorageError when it cannot be written.
        """
        if version < 1:
            raise ValueError("policy versions count from 1; 0 is the base")
        async with self._publishing:
            if version not in self._published:
                parent = self.carrier(delta_parent).manifest if delta_parent in self.published() else None
                carrier = await self._publish(
                    lambda key: self._store.make_policy(version, adapter_dir, key, parent=parent)
                )
                await self._memory.hold(carrier.manifest, self._store.files_of(carrier.manifest))
                await self._retire(in_use)

    async def publish_keyframe(self, version: int) -> None:
        """Makes and seeds the keyframe of a version that is published as a delta; at once when there is one.

        Raises SwarmError for a version that is not published, or whose files are damaged here and in RUN/adapters;
        StorageError when it cannot be written.
        """
        async with self._publishing:
            manifest = self.carrier(version).manifest
            if all(published.carrier.manifest.carrier == "delta" for published in self._published[version]):
                adapter_dir = self._directory.adapter(version)
                await self._publish(lambda key: self._store.make_keyframe(manifest, adapter_dir, key))

    def keep(self, version: int) -> None:
        """Keeps this version published, in place of the one named before, however old it gets."""
        self._kept = version

    def published(self) -> tuple[int, ...]:
        """Policy versions, ascending."""
        return tuple(sorted(self._published.keys() - {0}))

    def has(self, version: int) -> bool:
        """Whether nodes can fetch this version now."""
        return version in self._published

    def info_hashes(self, version: int) -> tuple[bytes, ...]:
        """Info-hashes of all the carriers of this version; none when it is not published, or no longer."""
        return tuple(published.carrier.info_hash for published in self._published.get(version, ()))

    def knows(self, info_hash: bytes, policy_version: int | None) -> bool:
        """Whether this is a carrier of that version, None for the base, and still published."""
        return policy_version != 0 and info_hash in self.info_hashes(policy_version or 0)

    def carrier(self, version: int, *, keyframe: bool = False) -> Carrier:
        """The carrier as which the version was published, or its keyframe. Raises SwarmError when that is not
        published, or no longer."""
        return self._find(version, keyframe=keyframe).carrier

    def offer_for(
        self, version: int, *, node_id: str, node_ip: str, hub_host: str, way: Way, keyframe: bool = False
    ) -> ArtefactOffer:
        """The signed offer of `carrier`, with the peers that a node at `node_ip`, which reached the hub as `hub_host`,
        can connect to, and with the version's place in memory if that is this host."""
        published = self._find(version, keyframe=keyframe)
        peers = self._tracker.peers(
            published.carrier.info_hash, node_ip=node_ip, hub_host=hub_host, now=time.monotonic()
        )
        return published.offer.model_copy(
            update={
                "web_seed_path": f"{WEB_SEED_PATH}{self._tracker.passkey(node_id)}/",
                "way": way,
                "peers": peers,
                "shared_memory": self._memory.address(version, node_ip=node_ip),
            }
        )

    def file(self, carrier_name: str, path: str) -> Path | None:
        """Where this file of a published carrier lies; None when no torrent names it."""
        for of_version in self._published.values():
            for published in of_version:
                carrier = published.carrier
                if carrier.directory.name == carrier_name:
                    named = any(path == name for name, _ in carrier.layout.files)
                    return carrier.directory / path if named else None
        return None

    def run_keys(self) -> tuple[RunKey, ...]:
        """The keys that anything published is sealed with, and the newest, in order."""
        return self._keys.named(self._keys_in_use() | {self._keys.current.key_id})

    def bar(self, node_ids: Collection[str]) -> bool:
        """Bars these nodes, and no others: they get nothing from here any more. True when the run has a new key by
        that, which all that is published from now on is sealed with."""
        self._tracker.bar(node_ids)
        return self._keys.bar(node_ids)

    def renew_key(self) -> None:
        """What is published from now on has a new key."""
        self._keys.renew()

    async def _publish(self, make: Callable[[RunKey], Carrier]) -> Carrier:
        """What `make` makes off the loop and is then seeded, with the key that is the newest in the end."""
        while True:
            key = self._keys.current
            carrier = await asyncio.to_thread(make, key)
            if key == self._keys.current:
                await self._swarm.seed(carrier.torrent, carrier.directory)
                if key == self._keys.current:
                    self._register(carrier)
                    return carrier
                await self._swarm.remove(carrier.info_hash)

    def _keys_in_use(self) -> set[int]:
        return {one.carrier.manifest.key_id for of_version in self._published.values() for one in of_version}

    def _find(self, version: int, *, keyframe: bool) -> _Published:
        for published in self._published.get(version, ()):
            if not (keyframe and published.carrier.manifest.carrier == "delta"):
                return published
        raise SwarmError(
            f"Policy version {version} is not published{' as a keyframe' if keyframe else ''}.",
            got=f"published: {', '.join(map(str, sorted(self._published)))}",
        )

    def _register(self, carrier: Carrier) -> None:
        """Counts an artefact among the published from now on."""
        self._tracker.register_self(carrier.info_hash, self._swarm.port)
        self._published.setdefault(carrier.manifest.policy_version, []).append(self._signed(carrier))

    def _signed(self, carrier: Carrier) -> _Published:
        offer = sign_offer(carrier.manifest, hub=self._hub, torrent=carrier.torrent, web_seed_path=WEB_SEED_PATH)
        return _Published(carrier=carrier, offer=offer)

    async def _retire(self, in_use: Collection[int] = ()) -> None:
        """Ends all but the newest versions, the one to keep, and those `in_use` among twice as many newest."""
        policies = [version for version in self.published() if version != self._kept]
        old, recent = policies[:-KEPT_VERSIONS], policies[-2 * KEPT_VERSIONS :]
        for version in [version for version in old if version not in in_use or version not in recent]:
            carriers = [published.carrier for published in self._published.pop(version)]
            for carrier in carriers:
                self._tracker.forget(carrier.info_hash)
                await self._swarm.remove(carrier.info_hash)
            await asyncio.to_thread(self._store.delete, carriers)
        self._keys.keep(self._keys_in_use())
