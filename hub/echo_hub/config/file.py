"""Read and write a run's settings. Flags override environment variables ECHO_HUB_*, these override RUN/config.toml, and
the file overrides the defaults.

In the environment, sections and keys are joined by two underscores: ECHO_HUB_TRAINING__STEPS=50.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic_settings import BaseSettings

from echo_hub.config.sections import HubConfig
from echo_hub.config.toml_text import as_toml
from echo_shared.errors import ConfigError
from echo_shared.files.atomic import write_private
from echo_shared.settings import load_settings, without_secrets

MOVED: Final = {
    "task.heldout_problems": "evaluation.problems",
    "training.clip_epsilon": "objective.clip_low and objective.clip_high",
    "training.micro_batch_tokens": "learner.micro_batch_tokens",
    "training.checkpoint_every": "learner.checkpoint_every",
    "training.checkpoints_kept": "learner.checkpoints_kept",
    "training.adapters_kept": "learner.adapters_kept",
    "training.threads": "learner.threads",
    "training.device": "learner.device",
}
"""Renamed settings: the new name for each old name that files of earlier runs may contain."""
_NO_MAIL: Final = (
    "the hub sends no e-mail: set alerts.webhook_url, or let Prometheus and Alertmanager send it by the rules in "
    "installers/prometheus/echo.rules.yml; remove this setting"
)
GONE: Final = {
    "alerts.email_to": _NO_MAIL,
    "alerts.email_from": _NO_MAIL,
    "alerts.smtp_host": _NO_MAIL,
    "alerts.smtp_port": _NO_MAIL,
    "alerts.smtp_security": _NO_MAIL,
    "alerts.smtp_user": _NO_MAIL,
    "alerts.smtp_password": _NO_MAIL,
    **dict.fromkeys(
        (
            *("alerts.learner_idle_share", "alerts.no_nodes_s", "alerts.per_hour", "alerts.quarantined_in_an_hour"),
            *("alerts.repeat_s", "alerts.reward_fell", "alerts.turned_away_per_s", "cost.hysteresis"),
            *("learner.hung_s", "learner.offload_optimizer", "log.events_kept", "log.kept", "log.max_bytes"),
            *("metrics.texts_every", "objective.rate_negative", "objective.rate_positive", "objective.shape_negative"),
            *("objective.shape_positive", "objective.temperature_negative", "objective.temperature_positive"),
            *("ray.namespace", "task.scorer_concurrency", "training.curriculum_floor", "trust.false_alarm"),
            "trust.miss",
        ),
        "the hub has one value for it: remove this setting",
    ),
    "about.token_from": "about.contact is also the contact for tokens: remove this setting",
    "metrics.wandb_entity": "set WANDB_ENTITY in the environment of echo-hub serve, and remove this setting",
    "metrics.wandb_project": "set WANDB_PROJECT in the environment of echo-hub serve, and remove this setting",
}
"""Removed settings that files of earlier runs may contain: for each, advice on what to do."""


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> HubConfig:
    """Return the effective settings. If `path` is None, no file is read. `overrides` are the flags, nested by section;
    the value None means that a flag is not given.

    Raises ConfigError that names the setting, its value, and the line, variable or flag that set it.
    """
    return load_settings(
        HubConfig, path, overrides, instead={**{old: f"it is {new} now" for old, new in MOVED.items()}, **GONE}
    )


def render_config(config: HubConfig) -> str:
    """Render `config` as commented TOML with every setting and secret, for the run's own file. `load_config` can read
    the result.

    To show settings to people, render `without_secrets(config)`. Raises ConfigError if task.options holds a value that
    TOML cannot express.
    """
    header = (
        "Every setting of this run. A line that is removed falls back to the default. Environment variables "
        "(ECHO_HUB_TRAINING__STEPS=50 sets training.steps) and flags win over this file."
    )
    return render_settings(config, header)


def render_chosen(config: HubConfig, reasons: Mapping[str, Mapping[str, str]]) -> str:
    """Render as TOML the settings that differ from the defaults, each below its reason.

    A setting without a reason gets its description instead. `load_config` reads the same settings from the result.
    """
    header = (
        "The settings that differ from the defaults. To list all settings: echo-hub serve RUN --dry-run. A line that "
        "is removed falls back to the default; environment variables (ECHO_HUB_TRAINING__STEPS=50 sets "
        "training.steps) and flags win over this file."
    )
    parts = [_comment(header)]
    for section_name in type(config).model_fields:
        section: BaseModel = getattr(config, section_name)
        about = type(section).model_json_schema()["properties"]
        lines = []
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if value != field.get_default(call_default_factory=True):
                reason = reasons.get(section_name, {}).get(name) or about[name]["description"]
                lines.append(f"{_comment(reason)}{name} = {_toml(value, where=f'{section_name}.{name}')}\n")
        if lines:
            parts.append(f"\n[{section_name}]\n" + "".join(lines))
    return "".join(parts)


def render_settings(settings: BaseSettings, header: str) -> str:
    """Render `settings` as commented TOML below `header`. All fields must be sections whose fields have docstrings."""
    parts = [_comment(header)]
    for section_name in type(settings).model_fields:
        section: BaseModel = getattr(settings, section_name)
        schema = type(section).model_json_schema()
        parts.append(f"\n{_comment(schema['description'])}[{section_name}]\n")
        for name, about in schema["properties"].items():
            value = _toml(getattr(section, name), where=f"{section_name}.{name}")
            parts.append(f"{_comment(about['description'] + _limits(about))}{name} = {value}\n")
    return "".join(parts)


def set_in_file(path: Path, section: str, key: str, value: str) -> None:
    """Set one setting in a run's file, and leave everything else unchanged.

    Raises ConfigError if the file's layout does not allow this, or if an environment variable overrides the setting.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        changed = _with_line(text, section, f"{key} = {_toml(value, where=f'{section}.{key}')}")
        expected = tomllib.loads(text)
        expected.setdefault(section, {})[key] = value
        if tomllib.loads(changed) != expected:
            raise ValueError("the file's layout is unusual")
        write_private(path, changed.encode())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "A setting cannot be set in the run's file.",
            got=f"{path}: {error}",
            do=f"Set it by hand: {key} = {json.dumps(value)} in [{section}].",
        ) from error
    config = load_config(path, {})
    if getattr(getattr(config, section), key) != value:
        holds = getattr(getattr(without_secrets(config), section), key)
        raise ConfigError(
            "A setting in the run's file has no effect.",
            got=f"{section}.{key} = {holds!r}, by the environment",
            do=f"Unset ECHO_HUB_{section.upper()}__{key.upper()}.",
        )


def _with_line(text: str, section: str, line: str) -> str:
    """Return the TOML text with `line` in the section. If the section already sets the same key, the new line replaces
    that line."""
    lines = text.splitlines()
    header = next((place for place, each in enumerate(lines) if re.match(rf"\s*\[{section}\]", each)), None)
    if header is None:
        return "\n".join([*lines, f"[{section}]", line, ""])
    key = line.partition(" =")[0]
    for place in range(header + 1, len(lines)):
        if lines[place].lstrip().startswith("["):
            break
        if re.match(rf"\s*{key}\s*=", lines[place]):
            lines[place] = line
            return "\n".join([*lines, ""])
    return "\n".join([*lines[: header + 1], line, *lines[header + 1 :], ""])


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=110, initial_indent="# ", subsequent_indent="# ") + "\n"


def _limits(schema: Mapping[str, Any]) -> str:
    """Return the bounds in a setting's JSON schema, as text to append to the setting's description."""
    words = [
        f"{word} {schema[key]}"
        for key, word in {
            "minimum": "at least",
            "exclusiveMinimum": "more than",
            "maximum": "at most",
            "exclusiveMaximum": "less than",
        }.items()
        if key in schema
    ]
    return f" ({', '.join(words)})" if words else ""


def _toml(value: Any, *, where: str) -> str:
    try:
        return as_toml(value)
    except TypeError as error:
        raise ConfigError(
            "A setting cannot be written to a settings file.",
            got=f"{where} holds {value!r}",
            do="Use text, numbers, true, false, lists and tables.",
        ) from error
