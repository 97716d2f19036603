"""HTTP statuses of the Tinker API. The SDK chooses between retry and error by the status and the kind of request.

kind          submission   a sample's submission        retrieval of an outcome
INVALID       400          400                          422: 400 would be asked for again three times
NOT_READY     503          429: asked for again for     503, after a pause: the client asks again at once, for ever
                           ever; 503 for five minutes
others        the status of `ANSWERED`
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Final

from aiohttp import hdrs, web

from echo_hub.tenants.refusal import Refusal, RefusalKind

ANSWERED: Final = {
    RefusalKind.INVALID: 400,
    RefusalKind.UNAUTHORIZED: 401,
    RefusalKind.QUOTA_SPENT: 402,
    RefusalKind.FORBIDDEN: 403,
    RefusalKind.NOT_FOUND: 404,
    RefusalKind.GONE: 410,
    RefusalKind.TOO_LARGE: 413,
    RefusalKind.TOO_MANY: 429,
    RefusalKind.NOT_READY: 503,
}
PAUSE_S: Final = 5.0
"""Pause before a 5xx response to a retrieval, in seconds. The SDK retries such a retrieval without a pause."""
_FRESH: Final = {hdrs.CACHE_CONTROL: "no-store"}


class AskedFor(Enum):
    """Kind of a request of the SDK: submission of a sample request, any other submission, or retrieval of an
    outcome.
    """

    SUBMISSION = "submission"
    SAMPLE = "sample"
    RETRIEVAL = "retrieval"


def status_of(kind: RefusalKind, moment: AskedFor) -> int:
    if kind is RefusalKind.INVALID and moment is AskedFor.RETRIEVAL:
        return 422
    if kind is RefusalKind.NOT_READY and moment is AskedFor.SAMPLE:
        return 429
    return ANSWERED[kind]


def json_answer(value: dict[str, Any], *, status: int = 200) -> web.Response:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return web.Response(text=text, status=status, content_type="application/json", headers=_FRESH)


def refused(refusal: Refusal, moment: AskedFor) -> web.Response:
    """Return the response for a refused request. The SDK shows its body to the user."""
    detail = refusal.brief if refusal.do is None else f"{refusal.brief} {refusal.do}"
    value = {"detail": detail, "code": refusal.kind.value}
    if refusal.param:
        value["param"] = refusal.param
    response = json_answer(value, status=status_of(refusal.kind, moment))
    if refusal.retry_after_s is not None:
        response.headers[hdrs.RETRY_AFTER] = str(max(1, round(refusal.retry_after_s)))
    return response
