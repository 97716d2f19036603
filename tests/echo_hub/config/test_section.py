from __future__ import annotations

import pytest
from pydantic import ValidationError

from echo_hub.config.section import Section


class Example(Section):
    number: float = 1.0
    """A number."""


def test_a_section_is_frozen_and_knows_its_keys() -> None:
    assert Example.model_json_schema()["properties"]["number"]["description"] == "A number."
    with pytest.raises(ValidationError):
        Example.model_validate({"other": 1})
    with pytest.raises(ValidationError):
        Example.model_validate({"number": float("nan")})
    with pytest.raises(ValidationError):
        Example().number = 2.0
