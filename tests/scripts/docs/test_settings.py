"""The page of settings lists every setting of hub and node, with default and meaning."""

from __future__ import annotations

import re

from pydantic import BaseModel

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationSet, MixtureTask
from echo_node.config import NodeConfig
from echo_node.core.manners import MannersConfig
from scripts.docs.settings import hub_page, node_page


def rows(page: str) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for section in page.split("\n## ")[1:]:
        anchor = re.search(r"\{ #(\w+) \}", section)
        assert anchor is not None
        cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
        found[anchor[1]] = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in cells}
    return found


def assert_told(model: type[BaseModel], told: dict[str, list[str]], *, but: str = "") -> None:
    assert set(told) == set(model.model_fields) - {but}
    for name, (kind, default, meaning) in told.items():
        assert kind and default and meaning, name


def test_every_setting_of_a_hub() -> None:
    told = rows(hub_page())
    assert [name for name in told if name in HubConfig.model_fields] == list(HubConfig.model_fields)
    assert set(told["mixturetask"]) == set(MixtureTask.model_fields)
    assert set(told["evaluationset"]) == set(EvaluationSet.model_fields)
    for name, field in HubConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        assert_told(field.annotation, told[name])
    assert told["training"]["steps"][:2] == ["integer, at least 1", "`60`"]
    assert told["run"]["seed"][1] == "`0`" and told["sampling"]["temperature"][1] == "`1.0`"


def test_every_setting_of_a_node() -> None:
    told = rows(node_page())
    assert list(told) == ["top", "manners"]
    assert_told(NodeConfig, told["top"], but="manners")
    assert_told(MannersConfig, told["manners"])
