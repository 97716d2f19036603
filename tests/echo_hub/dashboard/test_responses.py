from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from echo_hub.dashboard.responses import html_response, json_response, jsonable


@dataclass(frozen=True)
class Point:
    x: float
    y: tuple[float, ...]


def test_what_json_cannot_say_becomes_null() -> None:
    point = Point(x=float("nan"), y=(float("inf"), 1.5))
    assert jsonable({"p": point, 3: None}) == {"p": {"x": None, "y": [None, 1.5]}, "3": None}
    assert json.loads(json_response({"p": point}).text or "") == {"p": {"x": None, "y": [None, 1.5]}}


@pytest.mark.parametrize("inline_styles", [False, True])
def test_scripts_may_only_come_from_this_hub(inline_styles: bool) -> None:
    policy = html_response("", inline_styles=inline_styles).headers["Content-Security-Policy"]
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["script-src"] == "'self'"
    assert directives["default-src"] == "'none'"
    assert ("'unsafe-inline'" in directives["style-src"]) == inline_styles
