"""Write a setting's value as TOML on one line: `{"limit" = 3, "names" = ["a", "b"]}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def as_toml(value: Any) -> str:
    """Return a text, number, boolean, list, table or model as TOML. Fields of a model that are None are left out.
    Raises TypeError for any other value, because TOML has no null."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(as_toml(one) for one in value)}]"
        case BaseModel():
            return as_toml(value.model_dump(exclude_none=True))
        case Mapping():
            entries = (f"{as_toml(str(name))} = {as_toml(one)}" for name, one in value.items())
            return f"{{{', '.join(entries)}}}"
    raise TypeError(f"TOML has no form for {value!r}")
