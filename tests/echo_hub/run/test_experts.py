from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_hub.run.experts import Experts, experts_in
from tests.families import FAMILIES

PAIR = Experts(count=4, most_route_bytes=2 * 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_moe", PAIR),
        ("gpt_oss", PAIR),
        ("deepseek_v2", PAIR),
        ("qwen3_next", Experts(count=4, most_route_bytes=2 * 4)),
        ("llama", None),
        ("granitemoehybrid", None),
    ],
)
def test_a_base_of_every_family(name: str, expected: Experts | None, tmp_path: Path) -> None:
    FAMILIES[name]().save_pretrained(tmp_path)
    assert experts_in(tmp_path) == expected


def config_of(count: Any, of_token: Any, layers: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": of_token, "num_hidden_layers": layers}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of(512, 10, 48), None),
        (config_of(128, 8, 48), Experts(count=128, most_route_bytes=384)),
        ({"text_config": config_of(8, 2, 3)}, Experts(count=8, most_route_bytes=6)),
        (config_of("8", 2, 3), None),
        (config_of(8, None, 3), None),
        (config_of(8, 0, 3), None),
    ],
)
def test_a_config(config: dict[str, Any], expected: Experts | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert experts_in(tmp_path) == expected
