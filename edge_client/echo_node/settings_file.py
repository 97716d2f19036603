"""Reads and changes config.toml for `echo-node config`, one setting at a time. Comments and order are kept.

A key is a setting's name, after the name of its table: `width`, `manners.idle_after_s`. The docstring of a field
explains its setting. A value that `NodeConfig` refuses is never written.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit
from pydantic import BaseModel
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from echo_node.config import NodeConfig, load_config
from echo_node.host.hubs import Flag
from echo_shared.errors import BackendError, ConfigError, StorageError
from echo_shared.files.atomic import write_private
from echo_shared.settings import place_of, without_secrets

_WORDS: Final = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}
_KINDS: Final = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list: several values, or [] for none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingValue:
    """One setting, with the value for a node that starts now. A secret's value is masked."""

    key: str
    value: Any
    default: Any
    where: str
    """Source: `default`, the file with the line, an environment variable, or `join`."""
    meaning: str
    allowed: str


def keys_of(model: type[BaseModel] = NodeConfig, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        table = _table(field.annotation)
        if table is None:
            yield f"{prefix}{name}"
        else:
            yield from keys_of(table, f"{prefix}{name}.")


DECIDE_THE_ENGINE: Final = frozenset({"backend", "devices", "helpers"})


class SettingsFile:
    """The settings file. `joined`: the flags of `join`, which override the file."""

    def __init__(self, path: Path, joined: Mapping[str, Flag]) -> None:
        self.path = path
        self._joined = dict(joined)

    def all(self) -> list[SettingValue]:
        """Return every setting. Raises ConfigError if one is invalid."""
        return self._read(list(keys_of()))

    def one(self, key: str) -> SettingValue:
        """Return one setting. Raises ConfigError for an unknown key or an invalid setting."""
        _check_key(key)
        return self._read([key])[0]

    def _read(self, keys: Sequence[str]) -> list[SettingValue]:
        existing, defaults = self._existing(), NodeConfig.model_construct()
        config = without_secrets(load_config(existing, self._joined))
        return [
            SettingValue(
                key=key,
                value=_plain(value_of(config, key)),
                default=_plain(value_of(defaults, key)),
                where=self._where(key, existing),
                meaning=_about(key)["description"],
                allowed=allowed(key),
            )
            for key in keys
        ]

    def set(self, key: str, values: Sequence[str]) -> Any:
        """Write a setting as the user typed it, and return its value.

        Raises ConfigError for an invalid value, and StorageError if the file cannot be written; the file then stays
        unchanged.
        """
        _check_key(key)
        value = _plain(self._checked(key, _typed(key, values)))
        document = self._document()
        *tables, name = key.split(".")
        place: Container | Table = document
        for table in tables:
            if table not in place:
                place[table] = tomlkit.table()
            place = place[table]  # The file is valid, so this value is a table.
        place[name] = value
        self._write(document)
        return value

    def unset(self, key: str) -> bool:
        """Remove a setting from the file. Return True if it was there.

        Raises ConfigError if the default does not fit the other settings; the file then stays unchanged.
        """
        _check_key(key)
        document = self._document()
        *tables, name = key.split(".")
        place: Any = document
        for table in tables:
            place = place.get(table, {})
        if name not in place:
            return False
        before, was_valid = tomlkit.dumps(document), self._fault() is None
        del place[name]
        self._write(document)
        if was_valid and (fault := self._fault()) is not None:
            self._write(tomlkit.parse(before))
            raise _unchanged(key, fault) from fault
        return True

    def _fault(self) -> ConfigError | None:
        """Return the error in the settings; None without one."""
        try:
            load_config(self._existing(), self._joined)
        except ConfigError as error:
            return error
        return None

    def _existing(self) -> Path | None:
        return self.path if self.path.exists() else None

    def _where(self, key: str, existing: Path | None) -> str:
        where = place_of(NodeConfig, existing, self._joined, tuple(key.split(".")))
        return "join" if where == "command line" else where

    def _checked(self, key: str, value: Any) -> Any:
        *tables, name = key.split(".")
        wanted: dict[str, Any] = {name: value}
        for table in reversed(tables):
            wanted = {table: wanted}
        try:
            config = load_config(self._existing(), _laid_over(self._joined, wanted))
            if key in DECIDE_THE_ENGINE:
                _check_engine(config)
            return value_of(config, key)
        except (ConfigError, BackendError) as error:
            raise _unchanged(key, error) from error

    def _document(self) -> tomlkit.TOMLDocument:
        try:
            return tomlkit.parse(self.path.read_text(encoding="utf-8-sig") if self.path.exists() else "")
        except (OSError, UnicodeDecodeError, TOMLKitError) as error:
            raise ConfigError(
                "The settings file cannot be read.", got=f"{self.path}: {error}", do="Correct or remove it."
            ) from error

    def _write(self, document: tomlkit.TOMLDocument) -> None:
        try:
            # Resolve a link first, so that a linked file stays a link.
            write_private(self.path.resolve(), tomlkit.dumps(document).encode())
        except OSError as error:
            raise StorageError(
                "The settings cannot be written.",
                got=f"{self.path}: {error.strerror}",
                do="Make it writable, or free some space on its disk.",
            ) from error


def _unchanged(key: str, error: ConfigError | BackendError) -> ConfigError:
    return ConfigError(
        f"{key} is not changed: {error.what[0].lower()}{error.what[1:]}",
        got=error.got,
        do=f"{key} is {allowed(key)}. What it means: echo-node config list",
    )


def value_of(config: NodeConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def allowed(key: str) -> str:
    """Describe a setting's allowed values in words."""
    about = _about(key)
    if "enum" in about:
        return "one of " + ", ".join(about["enum"])
    limits = [f"{word} {about[limit]}" for limit, word in _WORDS.items() if limit in about]
    if "maxLength" in about:
        limits.append(f"at most {about['maxLength']} characters")
    return ", ".join([_KINDS[about["type"]], *limits])


def _about(key: str) -> dict[str, Any]:
    model: type[BaseModel] = NodeConfig
    *tables, name = key.split(".")
    for table in tables:
        model = _table(model.model_fields[table].annotation) or model
    about: dict[str, Any] = model.model_json_schema()["properties"][name]
    return about


def _table(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _check_engine(config: NodeConfig) -> None:
    """Raise BackendError for an engine that cannot run here. Blocks the calling thread for some tenths of a second."""
    from echo_node.backends import registry  # Import here: the registry imports the engines' libraries.
    from echo_node.engine.on_devices import check_devices
    from echo_node.host import hardware

    if config.devices:
        check_devices(config.devices, hardware.detect(), config.wanted_backend)
    else:
        registry.choose(hardware.detect(), config.wanted_backend, {})


def _check_key(key: str) -> None:
    known = list(keys_of())
    if key in known:
        return
    close = [one for one in known if one.split(".")[-1] == key] or difflib.get_close_matches(key, known, n=1)
    did_you_mean = f"Did you mean {close[0]}? " if close else ""
    raise ConfigError("There is no such setting.", got=key, do=f"{did_you_mean}All of them: echo-node config list")


def _typed(key: str, values: Sequence[str]) -> Any:
    """Return what the user has typed in the form that `NodeConfig` checks: a list for a setting with a list, else one
    value.
    """
    if _about(key).get("type") != "array":
        if len(values) != 1:
            raise ConfigError(
                f"{key} takes one value.",
                got=" ".join(values),
                do=f"{key} is {allowed(key)}. Quote spaces.",
            )
        return values[0]
    if len(values) == 1 and values[0].lstrip().startswith("["):
        try:
            return tomllib.loads(f"list = {values[0]}")["list"]
        except tomllib.TOMLDecodeError as error:
            do = 'Write it like ["a", "b"], or give the values one after the other.'
            raise ConfigError(
                f"{key} is not changed: the value is not a list.", got=f"{values[0]}: {error}", do=do
            ) from error
    return list(values)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        lower = result.get(key)
        result[key] = _laid_over(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return result
