"""The artefact files on disk. RUN/artefacts contains:

    NAME/       plain files of a policy version, for nodes on this machine and as the parent of later deltas
    CARRIER/    the sealed (encrypted) files that nodes fetch; CARRIER is `Manifest.carrier_name`
    CARRIER.torrent, CARRIER.manifest.json

A base model takes its size on disk twice: its own files and the sealed copy. So does an offered GGUF file. The manifest
is written last: a carrier without a manifest was never published and is deleted. All functions block the calling
thread.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from echo_hub.run.offered_gguf import OfferedGguf
from echo_shared import delta
from echo_shared.artefacts.hashed_files import describe_file, describe_files, verify_files
from echo_shared.artefacts.manifest import PAYLOAD_NAME, SEALED_SUFFIX, Manifest, ManifestFile, artefact_name
from echo_shared.artefacts.sealing import seal
from echo_shared.errors import CodecError, ConfigError, SwarmError
from echo_shared.files.atomic import disk_errors, sync, write_private
from echo_shared.swarm import make_torrent, read_torrent
from echo_shared.swarm.torrent import TorrentLayout
from echo_shared.wire.messages import RunKey

log = logging.getLogger(__name__)

_MANIFEST_SUFFIX: Final = ".manifest.json"
_TORRENT_SUFFIX: Final = ".torrent"
_WORK_SUFFIX: Final = ".tmp"
_DELTA_HANDICAP: Final = 1.05
"""Factor on a delta's size when it is compared with a keyframe's: a delta needs its parent version on the node, so a
delta must be clearly smaller."""
_NO_HASH: Final = "0" * 40
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
"""Further files of a base model that are included if they exist. The weights are always included."""
_WEIGHTS: Final = "model.safetensors"
_WEIGHTS_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """A published directory of sealed (encrypted) files, with its manifest and torrent."""

    manifest: Manifest
    directory: Path
    layout: TorrentLayout

    @property
    def torrent(self) -> bytes:
        return self.layout.torrent

    @property
    def info_hash(self) -> bytes:
        return self.layout.info_hash

    @property
    def total_bytes(self) -> int:
        return self.layout.total_bytes


class ArtefactStore:
    def __init__(self, root: Path, run_id: str) -> None:
        self._root = root
        self._run_id = run_id

    def read_all(self, key_ids: Collection[int]) -> list[Carrier]:
        """Return all complete carriers (encrypted files of artefacts) that are sealed with a key in `key_ids`, deltas
        before keyframes. Delete all other files."""
        self._root.mkdir(parents=True, exist_ok=True)
        prefix = artefact_name("base", self._run_id, 0).removesuffix("base")
        found: list[Carrier] = []
        whole: set[str] = set()
        for path in sorted(self._root.glob(f"{prefix}*{_MANIFEST_SUFFIX}")):
            name = path.name.removesuffix(_MANIFEST_SUFFIX)
            carrier = self._read(name, key_ids)
            if carrier is not None:
                found.append(carrier)
                whole |= {name, name + _TORRENT_SUFFIX, name + _MANIFEST_SUFFIX, carrier.manifest.name}
        for path in self._root.glob(f"{prefix}*"):
            if path.name not in whole:
                _remove(path)
        return found

    def make_base(self, model_dir: Path, key: RunKey, *, source: str | None) -> Carrier:
        """Seal the base model in `model_dir`. `source`: its id on a model hub. Raises ConfigError if the model is
        incomplete, or StorageError."""
        sources = _base_files(model_dir)
        name = artefact_name("base", self._run_id, 0)
        with self._disk_errors(name):
            files = tuple(describe_file(path, name=file) for file, path in sources.items())
        return self._make_base(name, "files", sources, files, key, source=source)

    def make_gguf(self, offered: OfferedGguf, key: RunKey) -> Carrier:
        """Seal the base model as a GGUF file. Raises StorageError."""
        return self._make_base(artefact_name("base", self._run_id, 0), "gguf", offered.files, offered.described, key)

    def _make_base(
        self,
        name: str,
        carrier: Literal["files", "gguf"],
        sources: Mapping[str, Path],
        files: tuple[ManifestFile, ...],
        key: RunKey,
        *,
        source: str | None = None,
    ) -> Carrier:
        draft = Manifest(
            kind="base",
            run_id=self._run_id,
            name=name,
            policy_version=0,
            carrier=carrier,
            key_id=key.key_id,
            info_hash=_NO_HASH,
            files=files,
            source=source,
        )
        with self._making(draft.carrier_name):
            return self._seal(draft, {file + SEALED_SUFFIX: path for file, path in sources.items()}, key)

    def make_policy(self, version: int, adapter_dir: Path, key: RunKey, *, parent: Manifest | None) -> Carrier:
        """Seal the version in `adapter_dir` as a keyframe (complete), or as a delta against `parent` if that is clearly
        smaller.

        Raises StorageError, and CodecError if the adapter cannot be encoded.
        """
        name = artefact_name("policy", self._run_id, version)
        with self._making(name):
            directory = self._root / name
            self._copy_adapter(adapter_dir, directory)
            draft = Manifest(
                kind="policy",
                run_id=self._run_id,
                name=name,
                policy_version=version,
                parent=version - 1,
                carrier="keyframe",
                key_id=key.key_id,
                info_hash=_NO_HASH,
                files=describe_files(directory),
            )
            drafts = [draft]
            if parent is not None and self._is_intact(parent):
                change = {"carrier": "delta", "delta_parent": parent.policy_version}
                drafts.append(draft.model_copy(update=change))
            return self._seal_smallest(drafts, key)

    def make_keyframe(self, manifest: Manifest, adapter_dir: Path, key: RunKey) -> Carrier:
        """Seal the manifest's version as a keyframe. Damaged files are first restored from `adapter_dir`.

        Raises StorageError, or SwarmError if the files in `adapter_dir` do not match the manifest either.
        """
        change = {"carrier": "keyframe", "delta_parent": None, "key_id": key.key_id}
        with self._disk_errors(manifest.name):
            if not self._is_intact(manifest):
                self._copy_adapter(adapter_dir, self.files_of(manifest))
                verify_files(manifest, self.files_of(manifest))
            return self._seal_smallest([manifest.model_copy(update=change)], key)

    def say_source(self, carrier: Carrier, source: str | None) -> Carrier:
        """Return this carrier (encrypted artefact) with another `source` in its manifest: the base model's id on a
        model hub."""
        manifest = carrier.manifest.model_copy(update={"source": source})
        with self._disk_errors(manifest.name):
            write_private(_beside(carrier.directory, _MANIFEST_SUFFIX), manifest.encode())
        return replace(carrier, manifest=manifest)

    def files_of(self, manifest: Manifest) -> Path:
        return self._root / manifest.name

    def delete(self, carriers: Collection[Carrier]) -> None:
        """Delete all files of these carriers (encrypted artefacts) and their versions. Manifests go first: if the hub
        stops meanwhile, the next `read_all` removes the rest."""
        for carrier in carriers:
            _remove(_beside(carrier.directory, _MANIFEST_SUFFIX))
        for carrier in carriers:
            _remove(_beside(carrier.directory, _TORRENT_SUFFIX))
            _remove(carrier.directory)
            _remove(self.files_of(carrier.manifest))

    def _read(self, name: str, key_ids: Collection[int]) -> Carrier | None:
        directory = self._root / name
        try:
            manifest = Manifest.model_validate_json(_beside(directory, _MANIFEST_SUFFIX).read_bytes())
            layout = read_torrent(_beside(directory, _TORRENT_SUFFIX).read_bytes())
        except (OSError, ValidationError, CodecError) as error:
            log.warning("The artefact %s cannot be read and is removed: %s", name, error)
            return None
        if manifest.key_id not in key_ids:
            log.warning("The artefact %s is sealed with a key that is lost, and is removed.", name)
        elif layout.info_hash.hex() != manifest.info_hash or not (layout.fits(directory) and self._has_files(manifest)):
            log.warning("The artefact %s is not what its manifest says and is removed.", name)
        else:
            return Carrier(manifest=manifest, directory=directory, layout=layout)
        return None

    def _has_files(self, manifest: Manifest) -> bool:
        directory = self.files_of(manifest)
        return manifest.kind == "base" or all(
            (directory / file.path).is_file() and (directory / file.path).stat().st_size == file.size_bytes
            for file in manifest.files
        )

    def _is_intact(self, manifest: Manifest) -> bool:
        try:
            verify_files(manifest, self.files_of(manifest))
        except (SwarmError, OSError) as error:
            log.warning("Policy version %d has been damaged on this disk: %s", manifest.policy_version, error)
            return False
        return True

    @staticmethod
    def _copy_adapter(adapter_dir: Path, directory: Path) -> None:
        """Copy the adapter. A hard link would be unsafe: the learner may rewrite its files in place."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in _POLICY_FILES:
            shutil.copyfile(adapter_dir / file, directory / file)
            sync(directory / file)

    def _seal_smallest(self, drafts: list[Manifest], key: RunKey) -> Carrier:
        """Encode a version once per draft (keyframe, delta) in parallel, and seal the smallest result."""
        work = self._root / (drafts[0].name + _WORK_SUFFIX)
        work.mkdir(exist_ok=True)
        try:
            payloads = [work / draft.carrier for draft in drafts]
            with ThreadPoolExecutor(len(drafts)) as threads:
                list(threads.map(self._encode, drafts, payloads))
            draft, payload = min(zip(drafts, payloads, strict=True), key=lambda pair: _cost(*pair))
            return self._seal(draft, {PAYLOAD_NAME: payload}, key)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _encode(self, draft: Manifest, payload: Path) -> None:
        parent = draft.delta_parent
        against = None if parent is None else self._root / artefact_name("policy", self._run_id, parent)
        delta.encode(self.files_of(draft), payload, parent=against)

    def _seal(self, draft: Manifest, sources: Mapping[str, Path], key: RunKey) -> Carrier:
        """Seal (encrypt) the files, and return the carrier that holds them. `sources` maps names in the carrier to
        source files."""
        directory = self._root / draft.carrier_name
        try:
            for name, source in sources.items():
                seal(source, directory / name, key.key)
            torrent = make_torrent(directory).torrent
            layout = read_torrent(torrent)
            manifest = draft.model_copy(update={"info_hash": layout.info_hash.hex()})
            write_private(_beside(directory, _TORRENT_SUFFIX), torrent)
            write_private(_beside(directory, _MANIFEST_SUFFIX), manifest.encode())
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return Carrier(manifest=manifest, directory=directory, layout=layout)

    @contextmanager
    def _making(self, name: str) -> Iterator[None]:
        """Wrap the creation of an artefact in a `with` block: first delete leftovers of an earlier attempt, and delete
        all files of the artefact if the block fails.
        """
        with self._disk_errors(name):
            for path in self._all_of(name):
                _delete(path)
            try:
                yield
            except BaseException:
                for path in self._all_of(name):
                    _remove(path)
                raise

    def _all_of(self, name: str) -> list[Path]:
        return [self._root / name, *self._root.glob(f"{name}.*")]

    def _disk_errors(self, name: str) -> AbstractContextManager[None]:
        return disk_errors(f"{name} cannot be published.", self._root)


def _cost(draft: Manifest, payload: Path) -> float:
    return payload.stat().st_size * (_DELTA_HANDICAP if draft.carrier == "delta" else 1.0)


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(directory.name + suffix)


def _remove(path: Path) -> None:
    """Remove a file or directory. If the system refuses, only log it: Windows refuses while a file is being served."""
    try:
        _delete(path)
    except OSError as error:
        log.warning("%s cannot be removed now; the hub tries again when it starts: %s", path, error)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _base_files(model_dir: Path) -> dict[str, Path]:
    """Return the files needed to load the model and its tokenizer: path in the artefact -> file."""
    weights = [_WEIGHTS]
    if (model_dir / _WEIGHTS_INDEX).is_file():
        try:
            shards = json.loads((model_dir / _WEIGHTS_INDEX).read_bytes())["weight_map"].values()
            weights = [_WEIGHTS_INDEX, *sorted({Path(shard).name for shard in shards})]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "The base model's weights index cannot be read.", got=f"{model_dir / _WEIGHTS_INDEX}: {error!r}"
            ) from error
    missing = [name for name in ("config.json", *weights) if not (model_dir / name).is_file()]
    if missing:
        raise ConfigError(
            "The base model is incomplete.",
            got=f"{model_dir} has no {', '.join(missing)}",
            do="Set model.base to a directory in Hugging Face layout with safetensors weights.",
        )
    return {name: model_dir / name for name in (*_BASE_FILES, *weights) if (model_dir / name).is_file()}
