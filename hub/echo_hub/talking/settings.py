"""Settings of the sampling process, and the directories of a run's adapters."""

from __future__ import annotations

from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError


def talking_settings(config: HubConfig, *, base_dir: Path, codec: PromptCodec, device: str) -> LearnerSettings:
    """Return the learner's settings for one process that samples on `device`; "" means the learner's device."""
    settings = LearnerSettings.of_run(config, base_dir=base_dir, stop_ids=codec.stop_ids)
    changed: dict[str, object] = {"processes": 1, "hosts": 1, "address": ""}
    if device:
        changed["device"] = device
    return settings.model_copy(update={"learner": settings.learner.model_copy(update=changed)})


def adapter_for(directory: RunDirectory, version: int) -> Path | None:
    """Return the directory of a version's adapter; None for version 0, the bare base model. Raises ConfigError if there
    is no such version.
    """
    if version == 0:
        return None
    versions = directory.adapter_versions()
    if version not in versions:
        raise ConfigError(
            "This policy version does not exist.",
            got=f"version {version}; the newest are: {', '.join(map(str, versions[-10:])) or 'none yet'}",
            do="Name one of these, or 0 for the base model.",
        )
    return directory.adapter(version)


def newest_version(directory: RunDirectory) -> int:
    """Return the newest version; 0, the base model, if no version is published yet."""
    return (directory.adapter_versions() or [0])[-1]
