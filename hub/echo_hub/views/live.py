"""The run's current settings: config.toml, with the operators' later changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo_hub.config.objective_change import as_text
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.sections import HubConfig
from echo_hub.core.operating import LiveSetting, restored
from echo_hub.core.settings import CoordinatorSettings


def with_live(config: HubConfig, settings: CoordinatorSettings) -> HubConfig:
    """Return `config` with the current values of the settings that the coordinator holds."""
    training = {
        "max_staleness": settings.max_staleness,
        "publish_every": settings.interval,
        "learning_rate": settings.learning_rate_of(config.training.steps),
    }
    cost = {"spend_cap_per_hour": settings.activation.spend_cap_per_hour}
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "objective": ObjectiveConfig.model_validate_json(settings.objective_of(config.training.steps)),
            "cost": config.cost.model_copy(update=cost),
        }
    )


def with_stored(config: HubConfig, stored: Mapping[str, Any]) -> HubConfig:
    """Return `config` with the operators' changes that the database stores, for callers without a coordinator."""
    return with_live(config, stored_settings(config, stored))


def stored_settings(config: HubConfig, stored: Mapping[str, Any]) -> CoordinatorSettings:
    """Return the settings that operators may change, with the changes that the database stores."""
    training = config.training
    settings = CoordinatorSettings(
        mode=config.run.mode,
        steps=training.steps,
        groups_per_step=training.groups_per_step,
        group_size=training.group_size,
        deadline_s=config.leases.deadline_s,
        max_staleness=training.max_staleness,
        publish_every=training.publish_every,
        learning_rate=training.learning_rate,
        objective=as_text(config.objective),
    )
    held = {LiveSetting.SPEND_CAP: config.cost.spend_cap_per_hour, **stored}
    return restored(settings, held)


def configured(config: HubConfig) -> dict[str, Any]:
    """Return the settings in config.toml that operators may change during the run, by name."""
    return {
        LiveSetting.MAX_STALENESS: config.training.max_staleness,
        LiveSetting.PUBLISH_EVERY: config.training.publish_every,
        LiveSetting.LEARNING_RATE: config.training.learning_rate,
        LiveSetting.OBJECTIVE: as_text(config.objective),
        LiveSetting.SPEND_CAP: config.cost.spend_cap_per_hour,
    }
