from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echo_hub.run.template_files import read_map, read_templates
from echo_shared.errors import ConfigError

ONE, OTHER = "{{ messages[0].content }}", "{{ tools }}{{ messages[0].content }}"
NAMED = [{"name": "tool_use", "template": OTHER}, {"name": "default", "template": ONE}]


def written(directory: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return directory


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {"chat_template": None}}, {}),
        ({"chat_template.jinja": ONE}, {"default": ONE}),
        ({"tokenizer_config.json": {"chat_template": ONE}}, {"default": ONE}),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, {"default": ONE, "tool_use": OTHER}),
        ({"tokenizer_config.json": {"chat_template": {"default": ONE, "rag": OTHER}}}, {"default": ONE, "rag": OTHER}),
        ({"chat_template.json": {"chat_template": ONE}}, {"default": ONE}),
        ({"chat_template.json": {"chat_template": NAMED}}, {"default": ONE, "tool_use": OTHER}),
        ({"processor_config.json": {"chat_template": ONE}}, {"default": ONE}),
        ({"processor_config.json": {"image_size": 2}, "chat_template.json": {"chat_template": ONE}}, {"default": ONE}),
        (
            {"chat_template.jinja": ONE, "additional_chat_templates/tool_use.jinja": OTHER},
            {"default": ONE, "tool_use": OTHER},
        ),
        ({"additional_chat_templates/default.jinja": ONE}, {"default": ONE}),
        (
            {"tokenizer_config.json": {"chat_template": ONE}, "additional_chat_templates/tool_use.jinja": OTHER},
            {"default": ONE, "tool_use": OTHER},
        ),
        (
            {
                "chat_template.jinja": ONE,
                "tokenizer_config.json": {"chat_template": "2"},
                "chat_template.json": {"chat_template": "3"},
                "processor_config.json": {"chat_template": "4"},
            },
            {"default": ONE},
        ),
        (
            {"tokenizer_config.json": {"chat_template": ONE}, "chat_template.json": {"chat_template": "3"}},
            {"default": ONE},
        ),
        ({"chat_template.jinja": b"\xef\xbb\xbf" + ONE.encode()}, {"default": ONE}),
        ({"chat_template.json": b"\xef\xbb\xbf" + json.dumps({"chat_template": ONE}).encode()}, {"default": ONE}),
        ({"tokenizer_config.json": {"chat_template": "\ufeff" + ONE}}, {"default": ONE}),
        ({"additional_chat_templates/default.jinja": b"\xef\xbb\xbf" + ONE.encode()}, {"default": ONE}),
        ({"chat_template.jinja": "½ {{ messages }}\r\n"}, {"default": "½ {{ messages }}\n"}),
    ],
)
def test_a_template_is_found_in_every_layout(tmp_path: Path, files: Mapping[str, Any], found: dict[str, str]) -> None:
    assert read_templates(written(tmp_path, files)) == found


@pytest.mark.parametrize(
    ("files", "what", "got"),
    [
        ({"chat_template.jinja": ""}, "is empty", "chat_template.jinja"),
        ({"chat_template.jinja": b"\xef\xbb\xbf \n\n"}, "is empty", "default in"),
        ({"tokenizer_config.json": {"chat_template": ""}}, "is empty", "tokenizer_config.json"),
        ({"chat_template.json": {"chat_template": "  \n"}}, "is empty", "chat_template.json"),
        ({"processor_config.json": {"chat_template": ""}}, "is empty", "processor_config.json"),
        (
            {"tokenizer_config.json": {"chat_template": [*NAMED, {"name": "rag", "template": ""}]}},
            "is empty",
            "rag in",
        ),
        ({"additional_chat_templates/tool_use.jinja": OTHER}, "no default", "tool_use"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "no default", "tool_use"),
        ({"tokenizer_config.json": {"chat_template": 5}}, "cannot be read", "5"),
        ({"tokenizer_config.json": {"chat_template": ["a"]}}, "cannot be read", "'a'"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default"}]}}, "cannot be read", "None"),
        ({"chat_template.json": {"chat_template": {"default": 7}}}, "cannot be read", "7"),
        ({"chat_template.jinja": ONE.encode("utf-16")}, "cannot be read", "chat_template.jinja"),
        ({"chat_template.jinja": b"\xff"}, "cannot be read", "chat_template.jinja"),
        ({"chat_template.json": "{"}, "is damaged", "chat_template.json"),
        ({"processor_config.json": "[1]"}, "is damaged", "processor_config.json"),
        ({"tokenizer_config.json": "[" * 100_000}, "is damaged", "tokenizer_config.json"),
    ],
)
def test_an_invalid_template_is_refused_with_its_file_name(
    tmp_path: Path, files: Mapping[str, Any], what: str, got: str
) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        read_templates(written(tmp_path, files))
    assert got in str(caught.value.got)
    assert caught.value.do


def test_a_missing_file_is_an_empty_map(tmp_path: Path) -> None:
    assert read_map(tmp_path / "config.json") == {}
    assert read_map(written(tmp_path, {"a.json": '{"a": Infinity, "a": 1}'}) / "a.json") == {"a": 1}
