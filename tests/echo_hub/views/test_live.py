from __future__ import annotations

from dataclasses import replace

from echo_hub.config.sections import CostConfig, HubConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.operating import LiveSetting
from echo_hub.serving.core_settings import coordinator_settings
from echo_hub.views.live import configured, with_live, with_stored

CONFIG = HubConfig(training=TrainingConfig(max_staleness=3, publish_every=2), cost=CostConfig(spend_cap_per_hour=1.5))


def test_without_changes_live_settings_are_the_configured_ones() -> None:
    settings = coordinator_settings(CONFIG, multi_turn=False)
    assert with_live(CONFIG, settings) == CONFIG == with_stored(CONFIG, {})
    assert set(configured(CONFIG)) == set(LiveSetting) - {LiveSetting.LEASING}


def test_operators_changes_hold() -> None:
    stored = {"max_staleness": 5, "publish_every": [[3, 1], [9, 4]], "learning_rate": [[4, 0.5]], "leasing": "paused"}
    stored["objective"] = [[4, '{"clip_high": 0.5}']]
    live = with_stored(CONFIG, {**stored, "spend_cap_per_hour": 4.0})
    assert (live.training.max_staleness, live.training.publish_every, live.training.learning_rate) == (5, 4, 0.5)
    assert live.objective.clip_high == 0.5 and live.objective.name == CONFIG.objective.name
    assert live.cost.spend_cap_per_hour == 4.0 and live.training.steps == CONFIG.training.steps
    settings = replace(coordinator_settings(CONFIG, multi_turn=False), max_staleness=4)
    assert with_live(CONFIG, settings).training.max_staleness == 4
