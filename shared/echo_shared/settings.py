"""Settings of hub and node. Priority: defaults < TOML file < environment < flags. An error names the setting and its
source.

A settings class is a pydantic-settings `BaseSettings` whose `env_prefix` and `env_nested_delimiter` define its
environment variables. A field with a confidential value is declared with SECRET. Settings are shown, logged or passed
on only as a copy from `without_secrets`; an error about such a field omits its value.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from echo_shared.errors import ConfigError

_Settings = TypeVar("_Settings", bound=BaseSettings)
_Model = TypeVar("_Model", bound=BaseModel)
_Location = tuple[int | str, ...]

MASK: Final = "**********"
SECRET_WORDS: Final = frozenset({"password", "passphrase", "secret", "secrets", "token", "tokens", "key", "keys"})
"""Words that mark a secret: in a table with keys of the user's choice, a text is a secret if its key contains one of
these words.
"""


class Secret:
    """Mark in a field's annotation that makes the field a secret. Use it together with `Field(repr=False)`."""


SECRET: Final = Secret()
SecretText = Annotated[str, Field(repr=False), SECRET]


def is_secret(field: FieldInfo) -> bool:
    return any(isinstance(mark, Secret) for mark in field.metadata)


def says_secret(name: str) -> bool:
    """Return True if `name`, such as the name of a task's option, contains one of SECRET_WORDS."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def without_secrets(settings: _Model) -> _Model:
    """Return a copy with MASK in place of each secret that is set, and of each text in a table whose key contains one
    of SECRET_WORDS.

    The copy is for display; it need not be valid.
    """
    changes = {
        name: _masked(getattr(settings, name)) if is_secret(field) else _without(getattr(settings, name))
        for name, field in type(settings).model_fields.items()
    }
    return settings.model_copy(update=changes)


def secrets_of(settings: BaseModel) -> Iterator[str]:
    """Yield each secret that is set, and the password in a secret URL. Logs must not contain these texts."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from secrets_of(value)
        elif is_secret(field):
            for text in filter(None, [value] if isinstance(value, str) else value):
                yield text
                with contextlib.suppress(ValueError):
                    yield from filter(None, [urlsplit(text).password])


def _masked(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_masked(item) for item in value)
    return MASK if value else value


def _without(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {
            key: _masked(item) if isinstance(item, str | list | tuple) and says_secret(str(key)) else _without(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_without(item) for item in value)
    return value


def load_settings(
    cls: type[_Settings],
    path: Path | None,
    overrides: Mapping[str, Any],
    *,
    instead: Mapping[str, str] = {},
    other_variables: Collection[str] = (),
) -> _Settings:
    """Load the settings from all sources.

    `path`: the TOML file, None = no file. `overrides`: the flags, nested like `cls`; None = not given. `instead` maps
    names of removed settings to a hint. `other_variables`: environment variables with the prefix of `cls` that are no
    settings.

    Raises ConfigError if the file cannot be read or is not TOML, and for unknown or invalid settings. An environment
    variable that has the prefix of `cls` but names no setting raises it too: otherwise a typo would go unnoticed.
    """
    text = "" if path is None else _read(path)
    from_file = {} if path is None else _parse(text, path)
    _refuse_unknown_variables(cls, other_variables)
    from_environment = _environment(cls)
    flags = _given(overrides)
    try:
        return cls(**_merged(_merged(from_file, from_environment), flags))
    except ValidationError as error:
        details = error.errors(include_url=False)
        places = [
            _place(item["loc"], text=text, path=path, sources=(flags, from_environment), cls=cls) for item in details
        ]
        raise _refusal(details, places, cls, instead) from error


def place_of(cls: type[_Settings], path: Path | None, overrides: Mapping[str, Any], location: tuple[str, ...]) -> str:
    """Return the source of a setting: `default`, the file and line, an environment variable, or `command line`.

    Raises ConfigError if the file cannot be read or is not TOML.
    """
    text = "" if path is None else _read(path)
    sources = _given(overrides), _environment(cls)
    below = {} if path is None else _parse(text, path)
    if not any(_holds(values, location) for values in (*sources, below)):
        return "default"
    return _place(location, text=text, path=path, sources=sources, cls=cls)


def line_of(text: str, location: _Location) -> int | None:
    """Return the line (from 1) of TOML `text` where the setting at `location` begins, or else the nearest table around
    it.

    Return None if the text has neither. The function parses the first line, the first two lines, and so on: the setting
    begins after the last part that is valid TOML and lacks the setting.
    """
    while location and not _holds(tomllib.loads(text), location):
        location = location[:-1]
    if not location:
        return None
    lines = text.splitlines(keepends=True)
    complete = 0
    for count in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        if _holds(document, location):
            break
        complete = count
    return complete + 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "The settings file cannot be read.",
            got=f"{path}: {error}",
            do="Correct or remove it; it must be saved as UTF-8.",
        ) from error


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: too many nested lists.
        raise ConfigError(
            "The settings file is not valid TOML.", got=f"{path}: {error}", do="Correct that line."
        ) from error


def _refuse_unknown_variables(cls: type[BaseSettings], others: Collection[str]) -> None:
    prefix = cls.model_config.get("env_prefix", "")
    known = {name.upper(): f"{prefix}{name}".upper() for name in _variables(cls, _delimiter(cls))}
    unknown = []
    for variable in sorted(os.environ):
        name = variable[len(prefix) :].upper()
        if variable.upper().startswith(prefix) and variable not in others and not _is_read(name.lower(), cls):
            # Compare names without the common prefix, which would make all of them similar.
            in_a_section = [full for full in known if full.endswith(f"{_delimiter(cls)}{name}")]
            close = in_a_section or difflib.get_close_matches(name, known, n=1)
            unknown.append(f"{variable}; did you mean {known[close[0]]}?" if close else variable)
    if unknown:
        several = f"{len(unknown)} environment variables name no setting."
        raise ConfigError(
            "An environment variable names no setting." if len(unknown) == 1 else several,
            got="\n       ".join(unknown),
            do="Correct or unset it and start again.",
        )


def _delimiter(cls: type[BaseSettings]) -> str | None:
    return cls.model_config.get("env_nested_delimiter")


def _variables(model: type[BaseModel], delimiter: str | None) -> Iterator[str]:
    """Yield the names of all environment variables that set something, without the prefix."""
    for name, field in model.model_fields.items():
        yield name
        if delimiter and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}{delimiter}{below}" for below in _variables(field.annotation, delimiter))


def _is_read(name: str, cls: type[BaseSettings]) -> bool:
    """Return True if pydantic-settings reads and validates the variable of this name (without the prefix)."""
    model: type[BaseModel] = cls
    parts = name.split(delimiter) if (delimiter := _delimiter(cls)) else [name]
    for place, part in enumerate(parts):
        field = model.model_fields.get(part)
        if field is None:
            return place > 0
        annotation = field.annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return place == len(parts) - 1 or get_origin(annotation) is dict
        model = annotation
    return True


def _environment(cls: type[BaseSettings]) -> dict[str, Any]:
    try:
        return EnvSettingsSource(cls)()
    except SettingsError as error:
        raise ConfigError(
            "An environment variable is not valid.",
            got=f"{error}: {error.__cause__}",
            do="Write lists and tables as JSON in environment variables.",
        ) from error


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: _given(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in given.items() if value is not None and value != {}}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        lower = result.get(key)
        result[key] = _merged(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return result


def _holds(values: Any, location: _Location) -> bool:
    for part in location:
        if not isinstance(values, Mapping | list | tuple):
            return False
        items = values if isinstance(values, Mapping) else dict(enumerate(values))
        if part not in items:
            return False
        values = items[part]
    return True


def _place(
    location: _Location,
    *,
    text: str,
    path: Path | None,
    sources: tuple[Mapping[str, Any], Mapping[str, Any]],
    cls: type[BaseSettings],
) -> str:
    """Return the highest-priority source that has the setting: flag, environment or file."""
    flags, environment = sources
    if not location:
        return "the settings together" if path is None else str(path)
    if _holds(flags, location):
        return "command line"
    if _holds(environment, location):
        delimiter = _delimiter(cls) or "__"
        name = cls.model_config.get("env_prefix", "") + delimiter.join(str(part) for part in location).upper()
        return name if name in os.environ else "environment"
    line = line_of(text, location) if path is not None else None
    return "the settings" if path is None else str(path) if line is None else f"{path}, line {line}"


def _refusal(
    details: list[ErrorDetails], places: list[str], cls: type[BaseSettings], instead: Mapping[str, str]
) -> ConfigError:
    complaints = []
    for item, place in zip(details, places, strict=True):
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            hint = f"; {instead[name]}" if name in instead else _suggestion(item["loc"], cls)
            complaints.append(f"{place}: there is no setting {name}{hint}")
        elif item["loc"] and not isinstance(item["input"], Mapping | BaseModel):
            got = MASK if _is_secret_at(cls, item["loc"]) else repr(item["input"])
            complaints.append(f"{place}: {name} = {got}: {item['msg'].removeprefix('Value error, ')}")
        else:
            complaints.append(f"{place}: {name + ': ' if name else ''}{item['msg'].removeprefix('Value error, ')}")
    what = "A setting is not valid." if len(complaints) == 1 else f"{len(complaints)} settings are not valid."
    return ConfigError(what, got="\n       ".join(complaints), do="Correct it and start again.")


def _is_secret_at(cls: type[BaseModel], location: _Location) -> bool:
    model: type[BaseModel] = cls
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:  # Inside a table or a list, the key says whether the value is a secret.
            return says_secret(str(part))
        if is_secret(field):
            return True
        if not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return any(says_secret(str(below)) for below in location[location.index(part) + 1 :])
        model = field.annotation
    return False


def _suggestion(location: _Location, cls: type[BaseModel]) -> str:
    """Return `; did you mean ...?` if the misspelled name resembles a setting of its section; otherwise ""."""
    model: type[BaseModel] = cls
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return ""
        model = field.annotation
    close = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
