"""Publish the base model and policy versions as signed, sealed (encrypted) artefacts, and seed them.

A policy version is published once, as a delta or as a keyframe (complete), whichever is smaller. A delta's keyframe is
made at a node's first request. Info-hash and signature survive restarts of the hub. The newest KEPT_VERSIONS stay
published; a version that nodes still fetch stays until it is older than the newest 2 * KEPT_VERSIONS. A version kept
longer for an evaluation is removed at the next start of the hub, and sealed again when the evaluation needs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_hub.core.training import KEPT_VERSIONS
from echo_hub.net.artefact_store import ArtefactStore, Carrier
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.tracker import Tracker
from echo_hub.run.directory import RunDirectory
from echo_hub.run.keys import RunKeys
from echo_hub.run.offered_gguf import OfferedGguf
from echo_shared.artefacts.manifest import sign_offer
from echo_shared.errors import SwarmError
from echo_shared.signing.identity import Identity
from echo_shared.swarm import Swarm
from echo_shared.wire.messages import ArtefactOffer, RunKey, Way
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

WEB_SEED_PATH: Final = "/artefacts/"
"""URL prefix of the web seed (`echo_hub.net.artefact_routes`); passkey, carrier name and file path follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    carrier: Carrier
    offer: ArtefactOffer
    """The offer that all nodes get, without the fields that differ between nodes."""


class Publisher:
    """All published artefacts of this run. Call `reopen` first.

    Version 0 is the base model, which may also be published as a GGUF file.
    """

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
        self._held: frozenset[int] = frozenset()
        """Versions that tenants' unfinished requests name."""
        self._publishing = asyncio.Lock()
        self._published: dict[int, list[_Published]] = {}
        """Carriers by version, in order of publication. A version's delta comes before its keyframe."""

    async def reopen(self) -> None:
        """Seed everything that was published before a restart of the hub, and delete incomplete artefacts."""
        self._keys = await asyncio.to_thread(RunKeys.open, self._directory.run_keys)
        for carrier in await asyncio.to_thread(self._store.read_all, self._keys.ids):
            await self._swarm.seed(carrier.torrent, carrier.directory)
            self._register(carrier)
        await self._retire()

    async def publish_base(self, model_dir: Path, *, source: str | None = None) -> None:
        """Seal, sign and seed the base model in `model_dir` (Hugging Face layout). If it is published already, only
        update `source`.

        `source`: id and revision on the model hub, if nodes are to fetch it there. Raises ConfigError if there are no
        safetensors weights, StorageError if the artefact cannot be written.
        """
        async with self._publishing:
            if (base := self._base("files")) is None:
                await self._publish(lambda key: self._store.make_base(model_dir, key, source=source))
            elif base.manifest.source != source:
                told = await asyncio.to_thread(self._store.say_source, base, source)
                others = [one for one in self._published[0] if one.carrier is not base]
                self._published[0] = [self._signed(told), *others]

    async def publish_gguf(self, offered: OfferedGguf | None) -> None:
        """Seal, sign and seed the base model as a GGUF file, unless it is published already. Withdraw another GGUF file
        that was published before; with None, only withdraw. Raises StorageError if the artefact cannot be written.
        """
        async with self._publishing:
            before = self._base("gguf")
            if before is not None and (offered is None or before.manifest.files != offered.described):
                self._published[0] = [one for one in self._published[0] if one.carrier is not before]
                await self._withdraw([before])
                before = None
            if offered is not None and before is None:
                await self._publish(lambda key: self._store.make_gguf(offered, key))

    def _base(self, form: str) -> Carrier | None:
        """Return the published base model in this form (`Manifest.carrier`), or None."""
        found = (one.carrier for one in self._published.get(0, ()))
        return next((carrier for carrier in found if carrier.manifest.carrier == form), None)

    async def publish_policy(
        self, version: int, adapter_dir: Path, *, delta_parent: int | None = None, in_use: Collection[int] = ()
    ) -> None:
        """Seal, sign and seed the PEFT adapter in `adapter_dir`; return at once if this version is already published.

        After `reopen`, call it for the version that the store lists as published: this restores the version if its
        artefact was damaged. A delta against `delta_parent` is published if the parent is still published and the delta
        is smaller. Versions `in_use` are retired later than others. Raises StorageError if the artefact cannot be
        written.
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
        """Make and seed the keyframe of a version published as a delta; return at once if the keyframe exists.

        Raises SwarmError if the version is not published, or its files are damaged both here and in RUN/adapters.
        Raises StorageError if the keyframe cannot be written.
        """
        async with self._publishing:
            manifest = self.carrier(version).manifest
            if all(published.carrier.manifest.carrier == "delta" for published in self._published[version]):
                adapter_dir = self._directory.adapter(version)
                await self._publish(lambda key: self._store.make_keyframe(manifest, adapter_dir, key))

    async def withdraw_policy(self, version: int) -> None:
        """Withdraw a version; do nothing if it is not published."""
        async with self._publishing:
            await self._withdraw([published.carrier for published in self._published.pop(version, ())])
            self._keys.keep(self._keys_in_use())

    def hold(self, versions: Iterable[int]) -> None:
        """Keep these versions published for tenants, however old the versions are, until the next call."""
        self._held = frozenset(versions)

    def keep(self, version: int) -> None:
        """Keep this version published, however old it is, until the next call names another one."""
        self._kept = version

    def published(self) -> tuple[int, ...]:
        return tuple(sorted(self._published.keys() - {0}))

    def has(self, version: int) -> bool:
        return version in self._published

    @property
    def has_gguf(self) -> bool:
        """True if the base model is also published as a GGUF file."""
        return self._base("gguf") is not None

    def info_hashes(self, version: int) -> tuple[bytes, ...]:
        """Return the info-hashes of all carriers (encrypted artefacts) of this version; empty if not published."""
        return tuple(published.carrier.info_hash for published in self._published.get(version, ()))

    def knows(self, info_hash: bytes, policy_version: int | None) -> bool:
        """Return True if a published carrier (encrypted artefact) of that version has this info-hash; `policy_version`
        None stands for the base."""
        return policy_version != 0 and info_hash in self.info_hashes(policy_version or 0)

    def carrier(self, version: int, *, keyframe: bool = False, gguf: bool = False) -> Carrier:
        """Return the first published carrier (encrypted artefact) of this version. With `keyframe`, return its
        keyframe; with `gguf`, return the base model's GGUF file. Raises SwarmError if there is none.
        """
        return self._find(version, keyframe=keyframe, gguf=gguf).carrier

    def offer_for(
        self,
        version: int,
        *,
        node_id: str,
        node_ip: str,
        hub_host: str,
        way: Way,
        keyframe: bool = False,
        gguf: bool = False,
    ) -> ArtefactOffer:
        """Return the signed offer of a version for one node. For `keyframe` and `gguf` see `carrier`.

        The offer lists the peers to which a node at `node_ip` can connect. `hub_host`: host under which the node
        reached the hub. For a node on the hub's own machine it also contains the version's place in shared memory.
        """
        published = self._find(version, keyframe=keyframe, gguf=gguf)
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
        """Return the path of this file of a published carrier (encrypted artefact); None if no published carrier has
        it.
        """
        for of_version in self._published.values():
            for published in of_version:
                carrier = published.carrier
                if carrier.directory.name == carrier_name:
                    named = any(path == name for name, _ in carrier.layout.files)
                    return carrier.directory / path if named else None
        return None

    def run_keys(self) -> tuple[RunKey, ...]:
        """Return the run keys of everything that is published, and the newest run key, in order of creation."""
        return self._keys.named(self._keys_in_use() | {self._keys.current.key_id})

    def bar(self, node_ids: Collection[str]) -> bool:
        """Bar exactly these nodes from all artefacts. Return True if that created a new run key for future
        artefacts."""
        self._tracker.bar(node_ids)
        return self._keys.bar(node_ids)

    def renew_key(self) -> None:
        """Create a new run key for everything published from now on."""
        self._keys.renew()

    async def _publish(self, make: Callable[[RunKey], Carrier]) -> Carrier:
        """Call `make` in a thread and seed its carrier. Repeat if the run key changed meanwhile, so that everything new
        is sealed with the newest key."""
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

    def _find(self, version: int, *, keyframe: bool, gguf: bool) -> _Published:
        for published in self._published.get(version, ()):
            form = published.carrier.manifest.carrier
            if gguf == (form == "gguf") and not (keyframe and form == "delta"):
                return published
        wanted = " as a keyframe" if keyframe else " as a GGUF file" if gguf else ""
        raise SwarmError(
            f"Policy version {version} is not published{wanted}.",
            got=f"published: {', '.join(map(str, sorted(self._published)))}",
        )

    def _register(self, carrier: Carrier) -> None:
        self._tracker.register_self(carrier.info_hash, self._swarm.port)
        self._published.setdefault(carrier.manifest.policy_version, []).append(self._signed(carrier))

    def _signed(self, carrier: Carrier) -> _Published:
        offer = sign_offer(carrier.manifest, hub=self._hub, torrent=carrier.torrent, web_seed_path=WEB_SEED_PATH)
        return _Published(carrier=carrier, offer=offer)

    async def _retire(self, in_use: Collection[int] = ()) -> None:
        """Withdraw old versions of the run. Kept are the newest KEPT_VERSIONS, the versions named to `keep` and `hold`,
        and of the newest 2 * KEPT_VERSIONS those `in_use`. Tenants' versions stay until `withdraw_policy`."""
        of_run = [version for version in self.published() if version < FIRST_TENANT_VERSION]
        policies = [version for version in of_run if version != self._kept and version not in self._held]
        old, recent = policies[:-KEPT_VERSIONS], policies[-2 * KEPT_VERSIONS :]
        for version in [version for version in old if version not in in_use or version not in recent]:
            await self._withdraw([published.carrier for published in self._published.pop(version)])
        self._keys.keep(self._keys_in_use())

    async def _withdraw(self, carriers: Collection[Carrier]) -> None:
        """Stop seeding these carriers, and delete their files."""
        for carrier in carriers:
            self._tracker.forget(carrier.info_hash)
            await self._swarm.remove(carrier.info_hash)
        await asyncio.to_thread(self._store.delete, carriers)
