"""How the pages answer: the headers that every response carries, HTML from templates, JSON from views."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""A name that a node made up must never run as a script here, and nothing is fetched from elsewhere."""


MAX_NUMBER: Final = 2**53


def jsonable(value: Any) -> Any:
    """`value` in JSON's types: dataclasses become objects, with the items of their `flat` fields among the others and
    the properties that their `ALSO_IN_JSON` names; numbers that are not finite become null."""
    if value is None or isinstance(value, (str, int)):
        return value  # Most of all that there is, so first.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            item = jsonable(getattr(value, field.name))
            found |= item if field.metadata.get("flat") else {field.name: item}
        return found | {name: jsonable(getattr(value, name)) for name in getattr(value, "ALSO_IN_JSON", ())}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def whole_number(text: str) -> int | None:
    """What a query may ask for: 0 to 2**53; None for anything else."""
    number = int(text) if len(text) <= 16 and text.isascii() and text.isdigit() else MAX_NUMBER + 1
    return number if number <= MAX_NUMBER else None


def json_response(value: Any, *, status: int = 200) -> web.Response:
    text = json.dumps(jsonable(value), allow_nan=False, separators=(",", ":"))
    response = web.Response(text=text, status=status, content_type="application/json", headers=SECURITY_HEADERS)
    response.headers["Cache-Control"] = "no-store"
    response.enable_compression()
    return response


def html_response(text: str, *, inline_styles: bool = False) -> web.Response:
    """A page. `inline_styles` for pages with charts: plotly puts style elements of its own, which vary with its
    version."""
    response = web.Response(text=text, content_type="text/html", headers=SECURITY_HEADERS)
    if inline_styles:
        policy = SECURITY_HEADERS["Content-Security-Policy"]
        response.headers["Content-Security-Policy"] = policy.replace(
            "style-src 'self'", "style-src 'self' 'unsafe-inline'"
        )
    response.headers["Cache-Control"] = "no-store"
    response.enable_compression()
    return response
