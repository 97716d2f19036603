from __future__ import annotations

import re

from echo_hub.dashboard.openapi import document
from scripts.docs.http_api import page


def test_every_path_and_object_is_reported() -> None:
    text = page()
    for path, methods in document()["paths"].items():
        for method in methods:
            assert f"### `{method.upper()} {path}`\n" in text
    for name, schema in document()["components"]["schemas"].items():
        section = text.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert re.findall(r"^\| `(\w+)` ", section, re.MULTILINE) == list(schema.get("properties", {}))


def test_bodies_bounds_and_answers_are_reported() -> None:
    section = page().partition("### `POST /api/v1/actions/max_staleness`")[2].partition("\n### ")[0]
    assert "| `value` | body | integer, at least 0, at most 1,000 |" in section
    assert re.findall(r"^\| (\d{3}) ", section, re.MULTILINE) == ["200", "202", "409"]
