"""Publishing: turns the base model and every policy version into a signed artefact, and seeds it.

RUN/artefacts holds, for each artefact, a directory NAME with its files and beside it NAME.torrent and
NAME.manifest.json. The manifest is written last: a directory without one was never published, and is removed when the
run is opened again. What has a manifest keeps its info-hash and its signature over any number of restarts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from echo_hub.net.host_memory import HostMemory
from echo_hub.net.tracker import Tracker
from echo_shared.artefacts import Manifest, artefact_name, describe_files, sign_offer
from echo_shared.errors import CodecError, ConfigError, StorageError, SwarmError
from echo_shared.files import write_private
from echo_shared.identity import Identity
from echo_shared.messages import ArtefactOffer
from echo_shared.swarm import Swarm, make_torrent, read_torrent

log = logging.getLogger(__name__)

WEB_SEED_PATH: Final = "/artefacts/"
"""Where `echo_hub.net.artefact_routes` serves what is published; the artefact's name and the file's path follow."""
KEPT_VERSIONS: Final = 8
"""Newest policy versions that stay published."""
_MANIFEST_SUFFIX: Final = ".manifest.json"
_TORRENT_SUFFIX: Final = ".torrent"
_POLICY_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
_BASE_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Taken where they are there; the weights come to them."""
_WEIGHTS: Final = "model.safetensors"
_WEIGHTS_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    manifest: Manifest
    directory: Path
    offer: ArtefactOffer
    """Without peers: they differ from node to node."""

    @property
    def info_hash(self) -> bytes:
        return bytes.fromhex(self.manifest.info_hash)


class Publisher:
    """All that this run has published. Version 0 is the base model. Call `reopen` first."""

    def __init__(
        self, run_dir: Path, run_id: str, hub: Identity, *, swarm: Swarm, tracker: Tracker, memory: HostMemory
    ) -> None:
        self._artefacts = run_dir / "artefacts"
        self._run_id = run_id
        self._hub = hub
        self._swarm = swarm
        self._tracker = tracker
        self._memory = memory
        self._kept = 0
        self._publishing = asyncio.Lock()
        self._published: dict[int, _Published] = {}

    async def reopen(self) -> None:
        """Seeds again what was published before, and clears away what was only half published."""
        prefix = artefact_name("base", self._run_id, 0).removesuffix("base")
        manifests = await asyncio.to_thread(_read_all, self._artefacts, prefix)
        policies = sorted(version for version in manifests if version > 0)
        for version in [*([0] if 0 in manifests else []), *policies]:
            manifest, torrent = manifests[version]
            await self._seed(manifest, torrent)
        await self._retire()

    async def publish_base(self, model_dir: Path) -> ArtefactOffer:
        """Signs and seeds the base model in `model_dir` (Hugging Face layout); at once when that has been done before.

        Its files are hard-linked where the file system allows it: the directory must not change while the run lasts.
        Raises ConfigError when there are no safetensors weights.
        """
        if 0 not in self._published:
            files = await asyncio.to_thread(_base_files, model_dir)
            await self._publish(0, files)
        return self.offer(0)

    async def publish_policy(self, version: int, adapter_dir: Path) -> ArtefactOffer:
        """Signs and seeds the PEFT adapter in `adapter_dir`; at once when this version is published already.

        So a hub that calls it at start, after `reopen`, for the version that its store says is published has that
        version back even when its artefact was damaged. Raises StorageError when it cannot be copied.
        """
        if version < 1:
            raise ValueError("policy versions count from 1; 0 is the base")
        async with self._publishing:
            if version not in self._published:
                await self._publish(version, {name: adapter_dir / name for name in _POLICY_FILES})
                published = self._published[version]
                await self._memory.hold(published.manifest, published.directory)
                await self._retire()
        return self.offer(version)

    def keep(self, version: int) -> None:
        """This version, in place of the one named before, stays published however old it gets."""
        self._kept = version

    def knows(self, info_hash: bytes, policy_version: int | None) -> bool:
        """Whether this is the artefact of that version, None for the base, and still published."""
        published = self._published.get(policy_version or 0)
        return policy_version != 0 and published is not None and published.info_hash == info_hash

    def has(self, version: int) -> bool:
        """Whether nodes can fetch it now."""
        return version in self._published

    def offer(self, version: int) -> ArtefactOffer:
        """The signed offer, without peers. Raises SwarmError for a version that is not published, or no longer."""
        if version not in self._published:
            raise SwarmError(
                f"Policy version {version} is not published.",
                got=f"published: {', '.join(map(str, sorted(self._published)))}",
            )
        return self._published[version].offer

    def offer_for(self, version: int, *, node_ip: str, hub_host: str) -> ArtefactOffer:
        """The offer with the peers that a node at `node_ip`, which reached the hub as `hub_host`, can connect to, and
        with the version's place in memory if that is this host."""
        offer = self.offer(version)
        peers = self._tracker.peers(
            self._published[version].info_hash, node_ip=node_ip, hub_host=hub_host, now=time.monotonic()
        )
        shared_memory = self._memory.address(version, node_ip=node_ip)
        return offer.model_copy(update={"peers": peers, "shared_memory": shared_memory})

    def file(self, name: str, path: str) -> Path | None:
        """Where this file of a published artefact lies; None when no manifest names it."""
        for published in self._published.values():
            if published.manifest.name == name and any(file.path == path for file in published.manifest.files):
                return published.directory / path
        return None

    async def _publish(self, version: int, files: Mapping[str, Path]) -> None:
        try:
            manifest, torrent = await asyncio.to_thread(self._write, version, files)
        except OSError as error:
            raise StorageError(
                f"Policy version {version} cannot be published.",
                got=str(error),
                do=f"Check the disk of {self._artefacts}: it must have room and be writable.",
            ) from error
        await self._seed(manifest, torrent)

    async def _seed(self, manifest: Manifest, torrent: bytes) -> None:
        published = _Published(
            manifest=manifest,
            directory=self._artefacts / manifest.name,
            offer=sign_offer(manifest, hub=self._hub, torrent=torrent, web_seed_path=WEB_SEED_PATH),
        )
        await self._swarm.seed(torrent, published.directory)
        self._tracker.register_self(published.info_hash, self._swarm.port)
        self._published[manifest.policy_version] = published

    async def _retire(self) -> None:
        """Ends all but the newest versions, and the one to keep: no node needs them any more."""
        policies = sorted(version for version in self._published if version not in (0, self._kept))
        for version in policies[:-KEPT_VERSIONS]:
            published = self._published.pop(version)
            self._tracker.forget(published.info_hash)
            await self._swarm.remove(published.info_hash)
            await asyncio.to_thread(_delete, published.directory)

    def _write(self, version: int, files: Mapping[str, Path]) -> tuple[Manifest, bytes]:
        """Blocks: copies and hashes."""
        kind: Literal["base", "policy"] = "policy" if version else "base"
        directory = self._artefacts / artefact_name(kind, self._run_id, version)
        temporary = directory.with_name(f"{directory.name}.tmp")
        for left_over in (temporary, directory):
            shutil.rmtree(left_over, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, source in files.items():
            # The learner may write an adapter's file again in place; a base is too large to copy without need.
            _copy(source, temporary / name, link=kind == "base")
        temporary.replace(directory)
        torrent = make_torrent(directory)
        manifest = Manifest(
            kind=kind,
            run_id=self._run_id,
            name=directory.name,
            policy_version=version,
            parent=version - 1 if version else None,
            info_hash=torrent.info_hash.hex(),
            files=describe_files(directory),
        )
        write_private(directory.with_name(directory.name + _TORRENT_SUFFIX), torrent.torrent)
        write_private(directory.with_name(directory.name + _MANIFEST_SUFFIX), manifest.encode())
        return manifest, torrent.torrent


def _read_all(artefacts: Path, prefix: str) -> dict[int, tuple[Manifest, bytes]]:
    """By policy version; what starts with `prefix`, the run's own, but is not whole is removed. Blocks."""
    artefacts.mkdir(parents=True, exist_ok=True)
    found: dict[int, tuple[Manifest, bytes]] = {}
    whole: set[str] = set()
    for path in sorted(artefacts.glob(f"{prefix}*{_MANIFEST_SUFFIX}")):
        name = path.name.removesuffix(_MANIFEST_SUFFIX)
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
            torrent = (artefacts / (name + _TORRENT_SUFFIX)).read_bytes()
            layout = read_torrent(torrent)
        except (OSError, ValidationError, CodecError) as error:
            log.warning("The artefact %s cannot be read and is removed: %s", name, error)
            continue
        if layout.info_hash.hex() == manifest.info_hash and layout.fits(artefacts / name):
            found[manifest.policy_version] = (manifest, torrent)
            whole |= {name, name + _TORRENT_SUFFIX, name + _MANIFEST_SUFFIX}
        else:
            log.warning("The artefact %s is not what its manifest says and is removed.", name)
    for path in artefacts.glob(f"{prefix}*"):
        if path.name not in whole:
            _remove(path)
    return found


def _delete(directory: Path) -> None:
    """The manifest first: what is left without one was never published, and goes at the next `reopen`."""
    _remove(directory.with_name(directory.name + _MANIFEST_SUFFIX))
    _remove(directory.with_name(directory.name + _TORRENT_SUFFIX))
    _remove(directory)


def _remove(path: Path) -> None:
    """Leaves it there when the system does not let go of it: Windows, while a file is being served."""
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed now; the hub tries again when it starts: %s", path, error)


def _base_files(model_dir: Path) -> dict[str, Path]:
    """Path in the artefact → file, of everything that loading the model and its tokenizer takes."""
    weights = [_WEIGHTS]
    if (model_dir / _WEIGHTS_INDEX).is_file():
        try:
            shards = json.loads((model_dir / _WEIGHTS_INDEX).read_bytes())["weight_map"].values()
            weights = [_WEIGHTS_INDEX, *sorted({Path(shard).name for shard in shards})]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "The base model's index of weights cannot be read.", got=f"{model_dir / _WEIGHTS_INDEX}: {error!r}"
            ) from error
    missing = [name for name in ("config.json", *weights) if not (model_dir / name).is_file()]
    if missing:
        raise ConfigError(
            "The base model is not complete.",
            got=f"{model_dir} has no {', '.join(missing)}",
            do="Set model.base to a directory in Hugging Face layout with safetensors weights.",
        )
    return {name: model_dir / name for name in (*_BASE_FILES, *weights) if (model_dir / name).is_file()}


def _copy(source: Path, target: Path, *, link: bool) -> None:
    if link:
        try:
            os.link(source.resolve(), target)
        except OSError:
            log.debug("%s cannot be linked and is copied.", source)
        else:
            return
    shutil.copyfile(source, target)
