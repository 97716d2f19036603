from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from echo_hub.config.objective_defaults import PUBLISHED, Advantage, Aggregation
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.registry import OBJECTIVES


def test_every_objective_has_a_recipe_of_choices_that_exist() -> None:
    assert set(PUBLISHED) == set(OBJECTIVES) == set(get_args(ObjectiveConfig.model_fields["name"].annotation))
    for paper in PUBLISHED.values():
        assert paper.aggregation in get_args(Aggregation) and paper.advantage in get_args(Advantage)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_uses_its_recipes_numbers(name: str) -> None:
    objective = OBJECTIVES[name]
    assert isinstance(objective, type)
    assert {field.name for field in dataclasses.fields(objective)} == set(PUBLISHED[name].numbers)


def test_cispo_is_a_mean_within_each_group() -> None:
    """MiniMax-M1 (eq. 4) averages over the tokens of one question's rollouts, then over questions."""
    assert PUBLISHED["cispo"].aggregation == "group_mean"


def test_the_settings_offer_the_tables_objectives() -> None:
    fields = ObjectiveConfig.model_fields
    assert get_args(fields["aggregation"].annotation) == ("published", *get_args(Aggregation))
    assert get_args(fields["advantage"].annotation) == ("published", *get_args(Advantage))
