"""Settings of a run that a bundle contains: those that determine draws, rewards and steps, without anything private.

Secrets are masked. Paths on the hub's machine are cut to their last name. Addresses and judges are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final
from urllib.parse import urlsplit

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import BUILTIN
from echo_shared.errors import CodecError, ConfigError
from echo_shared.settings import MASK, without_secrets

SECTIONS: Final = ("run", "task", "reward", "sampling", "training", "objective", "learner", "evaluation")
"""Sections that a bundle contains, apart from the base model's name and the adapters' precision."""
LEFT_OUT: Final = {"reward": ("judges",), "learner": ("address", "hosts")}
_START: Final = "start"
"""Name in the bundle for the adapter that the run started with. It hides the operator's name for the adapter."""
_OWN_CODE: Final = "python:"
_FILE_TASK: Final = "jsonl"


def open_settings(config: HubConfig) -> dict[str, Any]:
    """Return the run's settings for strangers, nested by section, as JSON values."""
    shown = without_secrets(config)
    settings: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(shown, name).model_dump(mode="json")
        settings[name] = {key: value for key, value in section.items() if key not in LEFT_OUT.get(name, ())}
    judges = shown.reward.judges
    weights = settings["reward"]["weights"]
    settings["reward"]["weights"] = {name: weight for name, weight in weights.items() if name not in judges}
    settings["task"]["options"] = _opened(settings["task"]["options"])
    for task in settings["task"]["mixture"].values():
        task["options"] = _opened(task["options"])
    base = config.model.base
    is_local = base not in BUILTIN and Path(base).expanduser().exists()
    settings["model"] = {
        "base": Path(base).name if is_local else base,
        "start_from": _START if config.model.start_from else "",
    }
    settings["dissemination"] = {"precision": config.dissemination.precision}
    return settings


def _opened(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _opened(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_opened(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if _has_password(value):
        return MASK
    names_a_file = any(word in key.lower() for word in ("path", "file", "dir", "folder"))
    if names_a_file or PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute():
        return PureWindowsPath(value).name
    return value


def _has_password(text: str) -> bool:
    try:
        return urlsplit(text).password is not None
    except ValueError:
        return False


def checkers_config(settings: Any, *, base: str, options: Mapping[str, Any], trust: Mapping[str, Any]) -> HubConfig:
    """Return the settings of a bundle's run for a checker, with the checker's own base model and task options.

    In `options`, the option of a mixture's task is named KEY.NAME. `trust` are the settings of the checker's verifier.
    Raises CodecError if they are not valid settings of a run.
    """
    try:
        wanted = {name: dict(settings.get(name, {})) for name in (*SECTIONS, "dissemination")}
        wanted["model"] = {"base": base, "start_from": settings.get("model", {}).get("start_from", "")}
        wanted["task"] = _with_options(wanted["task"], options)
        return load_config(None, {**wanted, "trust": dict(trust)})
    except (ConfigError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise CodecError("The bundle's settings are not valid here.", got=str(error)) from error


def _with_options(task: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    mixture = {key: dict(member) for key, member in task.get("mixture", {}).items()}
    own = dict(task.get("options", {}))
    for name, value in options.items():
        key, _, below = name.partition(".")
        if key in mixture and below:
            mixture[key]["options"] = {**mixture[key].get("options", {}), below: value}
        else:
            own[name] = value
    return {**task, "options": own, "mixture": mixture}


def why_not_scored(config: HubConfig, *, options: Mapping[str, Any], runs_own_code: bool) -> str:
    """Return why a checker cannot recompute the prompts and rewards of this run; "" if nothing is known to prevent it.

    `runs_own_code` is True if the checker allows tasks that are Python modules of somebody else.
    """
    for key, task in config.task.members.items():
        if task.name.startswith(_OWN_CODE) and not runs_own_code:
            return f"The task {task.name} is somebody's own code, which runs only with --run-task-code."
        wanted = f"{key}.path" if key else "path"
        if task.name == _FILE_TASK and wanted not in options:
            return f"The task reads a file, which is not in the bundle: name your copy with --option {wanted}=FILE."
    return ""
