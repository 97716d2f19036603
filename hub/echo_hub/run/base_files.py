"""Find or download the base model's directory, and read the model's configuration files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from echo_hub.run.gguf_base import gguf_in, unpacked
from echo_hub.run.template_files import TEMPLATES_FOLDER, read_map
from echo_shared.errors import ConfigError
from echo_shared.gguf.file_names import SUFFIX
from echo_shared.wire.messages.fields import MAX_TOKENS

BUILTIN: Final = {"builtin:tiny": "tiny_base", "builtin:small": "small_base"}
"""Base models included in Echo, mapped to the name of the model's directory in `echo_hub/assets`."""


MODEL_FILES: Final = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def resolve_base(reference: str) -> Path:
    """Return the directory of the base model that `reference` names. Download the model if necessary.

    `reference` is a key of `BUILTIN`, a directory in Hugging Face layout, a GGUF file, or an id on the model hub:
    `owner/name` or `owner/name@revision`. Raises ConfigError if there is no usable model.
    """
    if reference in BUILTIN:
        return Path(str(resources.files("echo_hub"))) / "assets" / BUILTIN[reference]
    directory = Path(reference).expanduser()
    if file := gguf_in(directory):
        return _checked(unpacked(file))
    if directory.is_dir():
        return _checked(directory)
    if reference.startswith(("builtin:", ".", "~")) or directory.is_absolute() or reference.endswith(SUFFIX):
        raise ConfigError(
            "The base model does not exist.",
            got=f"model.base = {reference!r}",
            do=f"Use {', '.join(BUILTIN)}, an existing directory or GGUF file, or an id on the model hub such as "
            "owner/name.",
        )
    return _checked(_download(reference))


def model_hub_source(reference: str, directory: Path) -> str:
    """Return `id@commit` of the model that `resolve_base(reference)` put into `directory`.

    Raises ConfigError if the model is not from the model hub.
    """
    # A snapshot directory is named after its commit, inside a folder that is named after the id (huggingface_hub,
    # "Understand caching").
    repo_id = reference.partition("@")[0]
    folder = f"models--{repo_id.replace('/', '--')}"
    if directory.parts[-3:-1] != (folder, "snapshots") or not re.fullmatch(r"[0-9a-f]{40}", directory.name):
        raise ConfigError(
            "Nodes cannot download this base model from a model hub.",
            got=f"model.base = {reference!r}, in {directory}",
            do='Set model.base to an id on the model hub, or dissemination.base to "swarm".',
        )
    return f"{repo_id}@{directory.name}"


def _download(reference: str) -> Path:
    from huggingface_hub import snapshot_download

    repo_id, _, revision = reference.partition("@")
    try:
        directory = snapshot_download(
            repo_id, revision=revision or None, allow_patterns=list(MODEL_FILES), ignore_patterns=["*/*"]
        )
        # Download the folder of templates from the same commit: the patterns above exclude all folders.
        snapshot_download(repo_id, revision=Path(directory).name, allow_patterns=[f"{TEMPLATES_FOLDER}/*.jinja"])
        return Path(directory)
    except (OSError, ValueError) as error:  # Base classes of huggingface_hub's errors for ids, access and connections.
        raise ConfigError(
            "The base model cannot be downloaded from the model hub.",
            got=f"model.base = {reference!r}: {error}",
            do="Check the id, the connection and, for a gated model, your access token; or name a directory.",
        ) from error


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(
            "This directory contains no model in Hugging Face layout.",
            got=str(directory),
            do="It needs config.json and the weights as .safetensors, or one GGUF file; pickled weights are never "
            "loaded.",
        )
    return directory


def vocabulary_size(directory: Path) -> int:
    """Return the vocabulary size from the model's config, or from the config's part for text. Raises ConfigError if
    there is none."""
    config = read_map(directory / "config.json")
    found = config.get("vocab_size", _text_config(config).get("vocab_size"))
    if type(found) is not int or found < 1:
        raise ConfigError(
            "The base model's config has no valid vocabulary size.",
            got=f"vocab_size = {found!r} in {directory / 'config.json'}",
            do="Use a language model in Hugging Face layout, whose config.json has vocab_size.",
        )
    return found


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def context_tokens_of(directory: Path) -> int:
    """Return the context length from the model's config, or from its part for text, limited to the size of a
    message."""
    config = read_map(directory / "config.json")
    known = config.get("max_position_embeddings") or _text_config(config).get("max_position_embeddings")
    return min(int(known), MAX_TOKENS) if known else MAX_TOKENS


def stop_ids_of(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the ids that end a completion: ids from the generation config (else the model config), plus the
    tokenizer's end-of-sequence token.

    Raises ConfigError for a model without such an id: completions would never end by themselves.
    """
    stop = read_map(directory / "generation_config.json").get("eos_token_id")
    if stop is None:
        stop = read_map(directory / "config.json").get("eos_token_id")
    candidates = [*(stop if isinstance(stop, list) else [stop]), tokenizer_eos]
    # A model cannot sample an id outside its vocabulary.
    known = range(vocabulary_size(directory))
    found = {int(token_id) for token_id in candidates if token_id is not None and int(token_id) in known}
    if not found:
        raise ConfigError(
            "The base model has no end-of-sequence token in its vocabulary.",
            got=f"eos_token_id = {', '.join(map(str, candidates))} in {directory}, vocab_size = {len(known)}",
            do="Set eos_token_id in its generation_config.json.",
        )
    return tuple(sorted(found))


def load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(
            "The base model has no fast tokenizer.",
            got=f"{path} is missing",
            do="Save it with AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes tokenizer.json.",
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception for an unreadable file.
        raise ConfigError("The base model's tokenizer cannot be read.", got=f"{path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
