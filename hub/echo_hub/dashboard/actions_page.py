"""The operator's actions page: GET /actions, with a form for each action and the log of past actions.

The forms are generated from the table of actions, so page, API and command line have the same fields and bounds. If an
action stops work, locks a user out or cannot be undone, it needs a confirmation. A separate page of the hub asks for
the confirmation, because browsers may have scripts turned off.

A new token is shown once, on the page that answers the form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jinja2
from aiohttp import web

from echo_hub.actions.records import ActionOutcome
from echo_hub.actions.requests import TABLE, Request, WrongRequestError, request_of, summary, taking_back
from echo_hub.actions.tenant_keys import key_lines
from echo_hub.dashboard.access.guard import KEY, TOKEN, actor_of
from echo_hub.dashboard.actions import ActionResult, ForbiddenError, NoSuchActionError, OperatorDesk
from echo_hub.dashboard.actions_api import STATUS, answer
from echo_hub.dashboard.formats import path_part
from echo_hub.dashboard.responses import html_response, json_response, see_other, whole_number
from echo_hub.dashboard.snapshots import Snapshots
from echo_hub.dashboard.templating import Template

RECORDS_SHOWN: Final = 50
CONFIRMED: Final = "confirmed"
OF_NODES: Final = frozenset({"ban", "unban", "pardon", "trust", "distrust"})
"""Actions on one node. The actions page has no forms for them: tables of nodes and the node's page have buttons."""
OF_TENANTS: Final = frozenset({"tenant_quota", "block_tenant", "unblock_tenant"})
"""Actions on one tenant. After such an action, the browser shows the page of tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    name: str
    help: str
    kind: str
    """Kind of input in the form: number, text, checkbox or select."""
    default: Any
    required: bool
    least: Any = None
    most: Any = None
    step: str = "any"
    choices: tuple[str, ...] = ()


def form_fields(kind: type[Request]) -> tuple[FormField, ...]:
    schema = kind.model_json_schema()
    found = []
    for name, of_field in schema["properties"].items():
        if name == "action":
            continue
        one = next((each for each in of_field.get("anyOf", ()) if each.get("type") != "null"), of_field)
        choices = tuple(one.get("enum", ()))
        plain = {"boolean": "checkbox", "integer": "number", "number": "number"}.get(one.get("type"), "text")
        found.append(
            FormField(
                name=name,
                help=" ".join(of_field.get("description", "").split()),
                kind="select" if choices else plain,
                default=of_field.get("default"),
                required=name in schema.get("required", ()),
                least=one.get("minimum"),
                most=one.get("maximum", one.get("maxLength")),
                step="1" if one.get("type") == "integer" else "any",
                choices=choices,
            )
        )
    return tuple(found)


class ActionsRoom:
    def __init__(self, desk: OperatorDesk, snapshots: Snapshots, templates: jinja2.Environment) -> None:
        self._desk = desk
        self._snapshots = snapshots
        self._template = Template(templates, "actions.html")

    async def serve(self, request: web.Request) -> web.Response:
        """GET /actions"""
        return await self._page(request)

    async def act(self, request: web.Request) -> web.Response:
        """POST /actions/{action}, from a form or from a script."""
        action = request.match_info["action"]
        if action not in TABLE:
            return json_response({"error": "There is no such action."}, status=404)
        form = await request.post()
        given = {name: value for name, value in form.items() if name not in (KEY, TOKEN, CONFIRMED) and value != ""}
        if not _is_a_persons(request):
            return await answer(self._desk.act(action, given, actor_of(request)))
        if TABLE[action].ASKS and form.get(CONFIRMED) != "yes":
            try:
                request_of(action, given)
            except WrongRequestError as error:
                return await self._page(request, refusal=str(error), status=400)
            return await self._page(request, asked=(action, given))
        node = str(given.get("node", "")) if action in OF_NODES else ""
        answered = self._desk.act(action, given, actor_of(request))
        then = "/tenants" if action in OF_TENANTS else "/actions"
        return await self._told(request, answered, then=f"/fleet/{path_part(node)}" if node else then)

    async def undo(self, request: web.Request) -> web.Response:
        """POST /actions/undo/{number}"""
        number = whole_number(request.match_info["number"])
        if number is None:
            return json_response({"error": "There is no such action."}, status=404)
        return await self._told(request, self._desk.undo(number, actor_of(request)), then="/actions")

    async def _told(self, request: web.Request, answered: Any, *, then: str) -> web.Response:
        try:
            told: ActionResult = await answered
        except (WrongRequestError, ForbiddenError, NoSuchActionError) as error:
            return await self._page(request, refusal=str(error), status=400)
        if told.record.outcome is ActionOutcome.REFUSED:
            return await self._page(request, refusal=told.record.detail, status=STATUS[ActionOutcome.REFUSED])
        if told.secret:
            return await self._page(request, told=told)
        return see_other(then)

    async def _page(
        self,
        request: web.Request,
        *,
        refusal: str = "",
        asked: tuple[str, Mapping[str, Any]] | None = None,
        told: ActionResult | None = None,
        status: int = 200,
    ) -> web.Response:
        records = await self._desk.log(limit=RECORDS_SHOWN, before=None)
        undone = {record.undoes for record in records if record.outcome is not ActionOutcome.REFUSED}
        run = (await self._snapshots.get()).run
        text = self._template.render(
            room="actions",
            run=run,
            forms=[
                (name, summary(kind), form_fields(kind), _now(run, name))
                for name, kind in TABLE.items()
                if name not in OF_NODES
            ],
            records=[(record, _can_be_undone(record, undone)) for record in records],
            refusal=refusal,
            asked=asked,
            asked_summary=summary(TABLE[asked[0]]) if asked else "",
            told=told,
            key_lines=key_lines(told.secret) if told else (),
        )
        return html_response(text, status=status)


def _now(run: Any, name: str) -> Any:
    return run.live.get(name)


def _can_be_undone(record: Any, undone: set[int | None]) -> bool:
    if record.outcome is not ActionOutcome.DONE or record.number in undone:
        return False
    return taking_back(record.action, record.request, record.before) is not None


def _is_a_persons(request: web.Request) -> bool:
    return "text/html" in request.headers.get("Accept", "")
