"""Find a model's chat templates in all Hugging Face layouts. If the directory has several layouts, the newest one
counts.

    chat_template.jinja                     the template
    additional_chat_templates/NAME.jinja    named templates
    tokenizer_config.json                   `chat_template`: a template, or a list of {"name": ..., "template": ...}
    chat_template.json                      `chat_template`, as older processors saved it
    processor_config.json                   `chat_template`

The template named `default` is used, but tasks with tools prefer the template named `tool_use`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo_shared.errors import ConfigError

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
_FILE: Final = "chat_template.jinja"
TEMPLATES_FOLDER: Final = "additional_chat_templates"
_MAPS: Final = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
_BYTE_ORDER_MARK: Final = "\ufeff"


def read_templates(directory: Path) -> dict[str, str]:
    """Return the templates by name. Unless the result is empty, `DEFAULT` is one of the names.

    Raises ConfigError for an unreadable file, an empty template, and several templates without a default.
    """
    found: dict[str, tuple[str, Path]] = {}
    for name in reversed(_MAPS):
        found |= _of_map(directory / name)
    found |= {file.stem: (_read(file), file) for file in sorted((directory / TEMPLATES_FOLDER).glob("*.jinja"))}
    if (directory / _FILE).is_file():
        found[DEFAULT] = _read(directory / _FILE), directory / _FILE
    if found and DEFAULT not in found:
        raise ConfigError(
            "The base model has several chat templates but no default.",
            got=f"{', '.join(sorted(found))} in {directory}",
            do=f"Copy the one to use to {directory / _FILE}.",
        )
    for name, (source, file) in found.items():
        if not source.strip():
            raise ConfigError(
                "A chat template of the base model is empty.",
                got=f"the template {name} in {file}",
                do=f"Put the model's own template into {directory / _FILE}; or remove the empty one, and prompts are "
                "plain text.",
            )
    return {name: source.removeprefix(_BYTE_ORDER_MARK) for name, (source, _) in found.items()}


def read_map(path: Path) -> dict[str, Any]:
    """Return the JSON object in one of a model's files; empty if the file is missing. Raises ConfigError if the file
    holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "A base model file is damaged.", got=f"{path}: {error}", do="Download the model again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            "A base model file is damaged.", got=f"{path}: not a JSON object", do="Download the model again."
        )
    return content


def _of_map(path: Path) -> dict[str, tuple[str, Path]]:
    given = read_map(path).get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: (given, path)}
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {one.get("name"): one.get("template") for one in given}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ConfigError(
            "A chat template of the base model cannot be read.",
            got=f"chat_template in {path}: {given!r}"[:300],
            do='It must be text, or a list of {"name": "default", "template": "..."}.',
        )
    return {name: (source, path) for name, source in given.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "A base model file cannot be read.", got=f"{path}: {error}", do="Save it as UTF-8."
        ) from error
