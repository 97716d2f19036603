"""What is published, as it lies on the disk. RUN/artefacts holds:

    NAME/                     a policy version's files as they are: for nodes of this host, and for later deltas
    CARRIER/                  its sealed files, which travel (`Manifest.carrier_name`; a base's are sealed copies, so
                              that a base takes its size on the hub's disk a second time)
    CARRIER.torrent, CARRIER.manifest.json

The manifest is written last: a carrier without one was never published. All of it blocks.
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
from typing import Final

from pydantic import ValidationError

from echo_shared import delta
from echo_shared.artefacts import PAYLOAD_NAME, SEALED_SUFFIX, Manifest, artefact_name
from echo_shared.errors import CodecError, ConfigError, SwarmError
from echo_shared.files import disk_errors, sync, write_private
from echo_shared.hashed_files import describe_file, describe_files, verify_files
from echo_shared.messages import RunKey
from echo_shared.sealing import seal
from echo_shared.swarm import make_torrent, read_torrent
from echo_shared.swarm.torrent import Layout

log = logging.getLogger(__name__)

_MANIFEST_SUFFIX: Final = ".manifest.json"
_TORRENT_SUFFIX: Final = ".torrent"
_WORK_SUFFIX: Final = ".tmp"
_DELTA_HANDICAP: Final = 1.05
"""A delta needs its parent, so it must save something."""
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
"""Files of a base model that are taken where they are there, beside its weights."""
_WEIGHTS: Final = "model.safetensors"
_WEIGHTS_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """One directory of sealed files that is published."""

    manifest: Manifest
    directory: Path
    layout: Layout
    """The layout of the sealed files: what travels."""

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
    """The artefacts of one run."""

    def __init__(self, root: Path, run_id: str) -> None:
        self._root = root
        self._run_id = run_id

    def read_all(self, key_ids: Collection[int]) -> list[Carrier]:
        """All that is whole and sealed with a known key, a delta before its version's keyframe; the rest is removed."""
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
        """Seals the base model in `model_dir`. Raises ConfigError when it is not complete, StorageError."""
        sources = _base_files(model_dir)
        name = artefact_name("base", self._run_id, 0)
        with self._making(name):
            draft = Manifest(
                kind="base",
                run_id=self._run_id,
                name=name,
                policy_version=0,
                carrier="files",
                key_id=key.key_id,
                info_hash=_NO_HASH,
                files=tuple(describe_file(path, name=name) for name, path in sources.items()),
                source=source,
            )
            return self._seal(draft, {name + SEALED_SUFFIX: path for name, path in sources.items()}, key)

    def make_policy(self, version: int, adapter_dir: Path, key: RunKey, *, parent: Manifest | None) -> Carrier:
        """Seals the version in `adapter_dir`: as a keyframe, or as a delta against `parent` if that is clearly smaller.

        Raises StorageError, and CodecError for an adapter that cannot be encoded.
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
        """Seals the version of this manifest as a keyframe. Files that were damaged are taken from `adapter_dir` again.

        Raises StorageError; SwarmError where these are not what was published either.
        """
        change = {"carrier": "keyframe", "delta_parent": None, "key_id": key.key_id}
        with self._disk_errors(manifest.name):
            if not self._is_intact(manifest):
                self._copy_adapter(adapter_dir, self.files_of(manifest))
                verify_files(manifest, self.files_of(manifest))
            return self._seal_smallest([manifest.model_copy(update=change)], key)

    def say_source(self, carrier: Carrier, source: str | None) -> Carrier:
        """The same carrier with another `source` in its manifest."""
        manifest = carrier.manifest.model_copy(update={"source": source})
        with self._disk_errors(manifest.name):
            write_private(_beside(carrier.directory, _MANIFEST_SUFFIX), manifest.encode())
        return replace(carrier, manifest=manifest)

    def files_of(self, manifest: Manifest) -> Path:
        """The directory of a policy version's own files."""
        return self._root / manifest.name

    def delete(self, carriers: Collection[Carrier]) -> None:
        """Deletes all there is of a version. Manifests first: what is left without one goes at the next `read_all`."""
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
        """Whether a policy version's own files are there, in their full size."""
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
        """Copies, and does not link: the learner may write its files again in place."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in _POLICY_FILES:
            shutil.copyfile(adapter_dir / file, directory / file)
            sync(directory / file)

    def _seal_smallest(self, drafts: list[Manifest], key: RunKey) -> Carrier:
        """Encodes a version in each of these ways, at once, and seals the smallest."""
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
        """The carrier of `draft`, of these files: name in the carrier → what is sealed."""
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
        """Clears away what is left of an earlier try, and of this one when it fails."""
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
    """Removes a file, or leaves it there when the system does not let go of it: Windows, while a file is being
    served."""
    try:
        _delete(path)
    except OSError as error:
        log.warning("%s cannot be removed now; the hub tries again when it starts: %s", path, error)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


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
