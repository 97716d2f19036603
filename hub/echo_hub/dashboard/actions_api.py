"""Actions for scripts, under /api/v1/, with a scoped token: `Authorization: Bearer TOKEN`.

POST /api/v1/actions/ACTION        body: the action's fields as one JSON object; empty or {} if it has none
POST /api/v1/actions/NUMBER/undo   reverses a finished action
GET  /api/v1/actions?before=N      {"actions": [`ActionRecord`, ...]}, the newest 100 with numbers below N
GET  /api/v1/tokens                {"tokens": [...]}, without their secrets; scope admin

The answer to an action is {"record": `ActionRecord`, "secret": the new token or ""}. Status 200: done. 202: accepted,
in progress. 409: refused, for the reason in `record.detail`. Any other answer is {"error": text}. Status 400: invalid
request. 403: the token's scope is too small. 404: not found.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from echo_hub.actions.records import ActionOutcome, is_good_for
from echo_hub.actions.requests import TABLE, WrongRequestError
from echo_hub.dashboard.access.guard import actor_of
from echo_hub.dashboard.actions import ActionResult, ForbiddenError, NoSuchActionError, OperatorDesk
from echo_hub.dashboard.responses import json_response, whole_number

MAX_BODY_BYTES: Final = 16_384
RECORDS_PER_ANSWER: Final = 100
STATUS: Final = {ActionOutcome.DONE: 200, ActionOutcome.WANTED: 202, ActionOutcome.REFUSED: 409}


class ActionsApi:
    def __init__(self, desk: OperatorDesk) -> None:
        self._desk = desk

    async def act(self, request: web.Request) -> web.Response:
        """POST /api/v1/actions/{action}"""
        action = request.match_info["action"]
        if action not in TABLE:
            return json_response({"error": f"There is no such action. Actions: {', '.join(TABLE)}."}, status=404)
        try:
            fields = await _fields(request)
        except WrongRequestError as error:
            return json_response({"error": str(error)}, status=400)
        return await answer(self._desk.act(action, fields, actor_of(request), strict=True))

    async def undo(self, request: web.Request) -> web.Response:
        """POST /api/v1/actions/{number}/undo"""
        number = whole_number(request.match_info["number"])
        if number is None:
            return json_response({"error": "An action's number must be 1, 2, ..."}, status=404)
        return await answer(self._desk.undo(number, actor_of(request)))

    async def log(self, request: web.Request) -> web.Response:
        """GET /api/v1/actions"""
        before = whole_number(request.query.get("before", "0"))
        if before is None:
            return json_response({"error": "before must be an action's number: 1, 2, ..."}, status=400)
        records = await self._desk.log(limit=RECORDS_PER_ANSWER, before=before or None)
        return json_response({"actions": records})

    async def tokens(self, request: web.Request) -> web.Response:
        """GET /api/v1/tokens"""
        if not is_good_for(actor_of(request).scope, "admin"):
            return json_response({"error": "This needs a token of scope admin."}, status=403)
        listed = [asdict(token) for token in await self._desk.tokens()]
        for token in listed:
            del token["token_hash"]
        return json_response({"tokens": listed})


async def answer(answered: Awaitable[ActionResult]) -> web.Response:
    """Await an action and return the JSON response for a script."""
    try:
        told = await answered
    except WrongRequestError as error:
        return json_response({"error": str(error)}, status=400)
    except ForbiddenError as error:
        return json_response({"error": str(error)}, status=403)
    except NoSuchActionError as error:
        return json_response({"error": str(error)}, status=404)
    return json_response({"record": told.record, "secret": told.secret}, status=STATUS[told.record.outcome])


async def _fields(request: web.Request) -> dict[str, Any]:
    """Return the fields in a request's JSON body. Raises WrongRequestError."""
    body = b""
    async for chunk in request.content.iter_chunked(MAX_BODY_BYTES):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise WrongRequestError(f"The body has more than {MAX_BODY_BYTES} bytes.")
    if not body:
        return {}
    if request.content_type != "application/json":
        raise WrongRequestError("The body must be JSON: Content-Type: application/json")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise WrongRequestError("The body is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise WrongRequestError("The body must be one JSON object.")
    return fields
