from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar

from echo_hub.dashboard.responses import json_response, jsonable
from echo_shared.records.run import FLAT


@dataclass(frozen=True)
class Point:
    x: float
    y: tuple[float, ...]


def test_values_without_a_json_form_become_null() -> None:
    point = Point(x=float("nan"), y=(float("inf"), 1.5))
    assert jsonable({"p": point, 3: None}) == {"p": {"x": None, "y": [None, 1.5]}, "3": None}
    assert jsonable((b"", b"\x00\xff")) == ["", "AP8="]
    assert json.loads(json_response({"p": point}).text or "") == {"p": {"x": None, "y": [None, 1.5]}}


@dataclass(frozen=True)
class Place:
    ALSO_IN_JSON: ClassVar = ("far",)

    point: Point = field(metadata=FLAT)
    figures: dict[str, float] = field(metadata=FLAT)
    y: str

    @property
    def far(self) -> float:
        return 10 * self.point.x


def test_a_views_embedded_and_derived_fields_are_its_own() -> None:
    place = Place(point=Point(x=1.0, y=()), figures={"loss": 0.5}, y="its own")
    assert jsonable(place) == {"x": 1.0, "loss": 0.5, "y": "its own", "far": 10.0}
