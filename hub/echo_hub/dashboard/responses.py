"""Responses of the pages: HTML from templates, JSON from views, and redirects."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from aiohttp import web

MAX_NUMBER: Final = 2**53
_FRESH: Final = {"Cache-Control": "no-store"}


def jsonable(value: Any) -> Any:
    """Convert `value` to JSON types.

    Dataclasses become objects. Fields marked as flat are merged into their parent, and the properties in `ALSO_IN_JSON`
    are added. Numbers that are not finite become null.
    """
    if value is None or isinstance(value, (str, int)):
        return value  # Tested first, because this case is the most frequent.
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
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def whole_number(text: str) -> int | None:
    """Parse a whole number from 0 to 2**53 in a query; None for any other text."""
    number = int(text) if len(text) <= 16 and text.isascii() and text.isdigit() else MAX_NUMBER + 1
    return number if number <= MAX_NUMBER else None


def json_response(value: Any, *, status: int = 200) -> web.Response:
    text = json.dumps(jsonable(value), allow_nan=False, separators=(",", ":"))
    return _compressed(web.Response(text=text, status=status, content_type="application/json", headers=_FRESH))


async def large_json_response(value: Any) -> web.Response:
    """Return a JSON response. The value is serialised on a thread, because a large fleet takes a second."""
    return await asyncio.to_thread(json_response, value)


def html_response(text: str, *, status: int = 200) -> web.Response:
    return _compressed(web.Response(text=text, status=status, content_type="text/html", headers=_FRESH))


def plain_html_response(body: bytes, *, status: int = 200) -> web.Response:
    """Return a page without compression. For a small page, compression costs more than it saves."""
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8", headers=_FRESH)


def see_other(path: str) -> web.Response:
    """Return a redirect that is followed with GET."""
    return web.Response(status=303, headers={**_FRESH, "Location": path})


def _compressed(response: web.Response) -> web.Response:
    response.enable_compression()
    return response
