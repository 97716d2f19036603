"""Actions for scripts, under /api/v1/, with a token of a scope: `Authorization: Bearer TOKEN`.

POST /api/v1/actions/ACTION        the action's fields as one JSON object; {} or nothing where it has none
POST /api/v1/actions/NUMBER/undo   what takes a done action back
GET  /api/v1/actions?before=N      {"actions": [`ActionRecord`, ...]}, the newest 100 first, of smaller numbers than N
GET  /api/v1/tokens                {"tokens": [...]}, without what is secret of them; for admins

An action's answer is {"record": `ActionRecord`, "secret": a token that was made, or ""}: 200 when it is done, 202 when
the hub has it and is at it, 409 when it was refused, `record.detail` says why. Else {"error": text}: 400 for what
cannot be, 403 for what the token is not good for, 404 for what there is not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from echo_hub.actions.records import Outcome, is_good_for
from echo_hub.actions.requests import TABLE, WrongRequestError
from echo_hub.dashboard.access.guard import actor_of
from echo_hub.dashboard.actions import Answered, ForbiddenError, NoSuchActionError, OperatorDesk
from echo_hub.dashboard.responses import json_response, whole_number

MAX_BODY_BYTES: Final = 16_384
RECORDS_PER_ANSWER: Final = 100
STATUS: Final = {Outcome.DONE: 200, Outcome.WANTED: 202, Outcome.REFUSED: 409}


class ActionsApi:
    def __init__(self, desk: OperatorDesk) -> None:
        self._desk = desk

    async def act(self, request: web.Request) -> web.Response:
        """POST /api/v1/actions/{action}"""
        action = request.match_info["action"]
        if action not in TABLE:
            return json_response({"error": f"There is no such action. There are: {', '.join(TABLE)}."}, status=404)
        try:
            fields = await _fields(request)
        except WrongRequestError as error:
            return json_response({"error": str(error)}, status=400)
        return await answer(self._desk.act(action, fields, actor_of(request), strict=True))

    async def undo(self, request: web.Request) -> web.Response:
        """POST /api/v1/actions/{number}/undo"""
        number = whole_number(request.match_info["number"])
        if number is None:
            return json_response({"error": "An action has a number: 1, 2, ..."}, status=404)
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
            return json_response({"error": "This takes a token of scope admin."}, status=403)
        listed = [asdict(token) for token in await self._desk.tokens()]
        for token in listed:
            del token["token_hash"]
        return json_response({"tokens": listed})


async def answer(answered: Awaitable[Answered]) -> web.Response:
    """What a script is told."""
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
    """Raises WrongRequestError."""
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
        raise WrongRequestError("The body is no JSON.") from None
    if not isinstance(fields, dict):
        raise WrongRequestError("The body must be one JSON object.")
    return fields
