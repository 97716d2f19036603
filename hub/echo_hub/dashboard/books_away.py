"""The response while the database server is unreachable. The hub waits for the server, and clients should retry
soon."""

from __future__ import annotations

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from echo_hub.dashboard.responses import json_response, plain_html_response
from echo_shared.errors import DATABASE_AWAY, StorageError

AGAIN_S: Final = 5
SAID: Final = "The database server cannot be reached; the hub waits until it is back. Try again in a moment."
_PAGE: Final = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{AGAIN_S}"><title>Away</title></head>
<body><h1>The database cannot be reached</h1><p>{SAID}</p></body></html>
"""


@web.middleware
async def books_away(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 503 with Retry-After to a request that failed because the database server is unreachable."""
    try:
        return await handler(request)
    except StorageError as error:
        if error.code != DATABASE_AWAY:
            raise
    if "text/html" in request.headers.get("Accept", ""):
        answer = plain_html_response(_PAGE.encode(), status=503)
    else:
        answer = json_response({"error": SAID}, status=503)
    answer.headers["Retry-After"] = str(AGAIN_S)
    return answer
