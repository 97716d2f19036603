"""Every scenario setting has an explanation; settings that the hub has too have equal names and limits."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from echo_hub.config.sections import HubConfig
from echo_hub.simulator.scenario import Scenario, ScenarioSection


def sections() -> dict[str, type[ScenarioSection]]:
    return {name: type(getattr(Scenario(), name)) for name in Scenario.model_fields}


def test_every_section_and_setting_has_its_text() -> None:
    for name, section in sections().items():
        assert section.__doc__, name
        assert section.model_fields.keys() <= section.descriptions().keys()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("training", "groups_per_step"),
        ("training", "group_size"),
        ("training", "max_staleness"),
        ("training", "publish_every"),
        ("training", "on_new_version"),
        ("leases", "deadline_s"),
    ],
)
def test_a_hub_s_setting_has_the_hub_s_limits(section: str, key: str) -> None:
    hub = type(getattr(HubConfig(), section)).model_fields[key]
    simulated = sections()[section].model_fields[key]
    assert (simulated.metadata, simulated.annotation) == (hub.metadata, hub.annotation)


def test_the_rollouts_that_a_step_consumes() -> None:
    assert Scenario.model_validate({"training": {"groups_per_step": 3, "group_size": 5}}).rollouts_per_step == 15


def test_a_scenario_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Scenario().nodes.count = 3


def test_only_where_versions_come_in_mid_completion_are_completions_interrupted() -> None:
    with pytest.raises(ValidationError, match=r'on_new_version must be "finish" when run\.mode = "sequential"'):
        Scenario.model_validate({"run": {"mode": "sequential"}, "training": {"on_new_version": "interrupt"}})
