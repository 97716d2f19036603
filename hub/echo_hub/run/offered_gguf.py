"""The GGUF file that a hub offers to nodes that run llama.cpp, next to the base model.

Such a node fetches the file in place of the base model's weights, and converts nothing. The file has the weights of the
base model, usually quantised. The hub checks that architecture, shapes and weights fit the base: nodes that draw with
another model would make every rollout useless.

If the base model is a GGUF file, the hub offers this file unchanged. The learner then trains on the dequantised weights
(`echo_hub.run.gguf_base`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from echo_hub.config.sections import ModelConfig
from echo_hub.run.gguf_base import gguf_in
from echo_shared.artefacts.hashed_files import describe_file
from echo_shared.artefacts.manifest import ManifestFile, artefact_name, content_of
from echo_shared.errors import CodecError, ConfigError, SwarmError
from echo_shared.files.atomic import write_private
from echo_shared.gguf.file_names import SUFFIX, part_names
from echo_shared.wire.messages.engines import precision_of_file

NOTHING: Final = "none"
"""Value of model.gguf that makes the hub offer no GGUF file, even if the base model is one."""
_CONFIG_FILE: Final = "config.json"
_ON_MODEL_HUB: Final = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[^@]+\.gguf)(@(?P<revision>[\w./-]+))?", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedGguf:
    """The GGUF file or its parts, together with the base model's config.json, which nodes also need."""

    parts: tuple[Path, ...]
    files: dict[str, Path]
    """All files by name: config.json and the parts."""
    described: tuple[ManifestFile, ...]
    """Manifest entries of `files`."""
    weights: str
    """Type of the weights, such as q8_0."""

    def precision(self, run_id: str) -> str:
        """Return the name of the precision that nodes with this file report to the hub."""
        return precision_of_file(self.weights, content_of(artefact_name("base", run_id, 0), self.described))


def offered_gguf(model: ModelConfig, base_dir: Path, *, known: Path) -> OfferedGguf | None:
    """Return the file that the settings offer for the base model in `base_dir`; None if they offer none. A file on the
    model hub is downloaded first. Blocks the calling thread.

    The results of the check are stored in the file `known`, so that a restarted hub reads only files that changed.
    Raises ConfigError if the GGUF file is missing, unreadable, or does not fit the base model, and StorageError if the
    disk refuses.
    """
    file = _found(model)
    if file is None:
        return None
    try:
        return _offered(file, base_dir / _CONFIG_FILE, known)
    except (CodecError, SwarmError) as error:
        raise ConfigError(
            "The GGUF file for llama.cpp cannot be used.",
            got=f"{file}: {error.what} {error.got or ''}".rstrip(),
            do=error.do or f'Set model.gguf to a GGUF file of the base model, or to "{NOTHING}".',
        ) from error


class _KnownFile(BaseModel):
    """Size, modification time and hash of an offered file when it was last read."""

    file: Path
    size_bytes: int
    modified_ns: int
    sha256: str = ""


class _Known(BaseModel):
    """Results of the last check of the offered files, stored so that the check is not repeated."""

    weights: str
    files: dict[str, _KnownFile]


def _offered(file: Path, config: Path, known_path: Path) -> OfferedGguf:
    parts = tuple(file.with_name(name) for name in part_names(file.name))
    files = {config.name: config, **{part.name: part for part in parts if part.is_file()}}
    known, now = _read_known(known_path), {name: _state(path) for name, path in files.items()}
    if known is None or {name: one.model_copy(update={"sha256": ""}) for name, one in known.files.items()} != now:
        # Import here: the import and the checks take seconds, and are needed once for a file.
        from echo_hub.run.gguf_fit import check_fits
        from echo_shared.gguf.opened_model import OpenedModel

        opened = OpenedModel(file)
        check_fits(opened, config.parent)
        hashed = {
            name: one.model_copy(update={"sha256": describe_file(files[name], name=name).sha256})
            for name, one in now.items()
        }
        known = _Known(weights=opened.weights, files=hashed)
        write_private(known_path, known.model_dump_json(indent=1).encode())
    described = tuple(
        ManifestFile(path=name, size_bytes=one.size_bytes, sha256=one.sha256) for name, one in known.files.items()
    )
    return OfferedGguf(parts=parts, files=files, described=described, weights=known.weights)


def _state(path: Path) -> _KnownFile:
    state = path.stat()
    return _KnownFile(file=path.resolve(), size_bytes=state.st_size, modified_ns=state.st_mtime_ns)


def _read_known(path: Path) -> _Known | None:
    """Return the results of an earlier check; None if their file is missing or unreadable."""
    try:
        return _Known.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _found(model: ModelConfig) -> Path | None:
    """Return the path of the offered file, or of its first part. Return None if no file is offered. Raises ConfigError
    if the file is missing."""
    reference = model.gguf
    if reference == NOTHING:
        return None
    if not reference:
        return gguf_in(Path(model.base).expanduser())
    path = Path(reference).expanduser()
    if path.is_dir() or path.is_file():
        if (file := gguf_in(path)) is not None:
            return file
    elif (on_hub := _ON_MODEL_HUB.fullmatch(reference)) is not None:
        return _downloaded(on_hub["repo"], on_hub["file"], on_hub["revision"], reference)
    raise ConfigError(
        "There is no such GGUF file for llama.cpp.",
        got=f"model.gguf = {reference!r}",
        do=f"Set it to a file that ends in {SUFFIX}, to owner/name:FILE{SUFFIX} on the model hub, or remove it.",
    )


def _downloaded(repo: str, file: str, revision: str | None, reference: str) -> Path:
    from huggingface_hub import hf_hub_download

    folder, _, name = file.rpartition("/")
    try:
        paths = [
            hf_hub_download(repo, f"{folder}/{part}" if folder else part, revision=revision)
            for part in part_names(name)
        ]
    except (OSError, ValueError) as error:  # Base classes of huggingface_hub's errors for ids, access and connections.
        raise ConfigError(
            "The GGUF file for llama.cpp cannot be downloaded from the model hub.",
            got=f"model.gguf = {reference!r}: {error}",
            do="Check id, file name, connection and, for a gated model, your access token; or name a local file.",
        ) from error
    return Path(paths[0])
