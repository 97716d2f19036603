from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.config.toml_text import as_toml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


@given(VALUES)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert tomllib.loads(f"value = {as_toml(value)}") == {"value": value}


@pytest.mark.parametrize("value", [b"bytes", None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=f"TOML has no form for {value!r}"):
        as_toml({"values": [1, value]})
