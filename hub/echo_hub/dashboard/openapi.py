"""The API for scripts as OpenAPI 3.1: GET /api/v1/openapi.json.

The document is generated from the classes that validate requests and form answers, so it always agrees with the API.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, get_args, get_type_hints

import numpy as np
from aiohttp import web
from pydantic import TypeAdapter

import echo_shared
from echo_hub.actions.records import ActionRecord, ApiToken
from echo_hub.actions.requests import TABLE, summary
from echo_hub.dashboard.fleet import COLUMNS, NOT_SAID, STANDINGS, STATES
from echo_hub.dashboard.model import NodeView, RunView
from echo_hub.dashboard.responses import json_response
from echo_hub.dashboard.work_curve import WorkCurve
from echo_shared.records.credit import BOARD_ORDERS, CreditDay, CreditStanding, PublicReceipt, RunElsewhere
from echo_shared.records.node import CheckEvidence, NodeOutcome, TrustDecision
from echo_shared.records.rollout import GroupView, RolloutFilter, RolloutsPage, RolloutSummary
from echo_shared.records.run import RunEvent, StepRecord
from echo_shared.records.tenant import TenantsOverview
from echo_shared.wire.messages.fields import PackedArray

VERSION: Final = "3.1.0"
_REF: Final = "#/components/schemas/{model}"
ANSWERS: Final = (
    *(RunView, NodeView, StepRecord, RunEvent, RolloutsPage, GroupView, ActionRecord, ApiToken),
    *(CreditStanding, CreditDay, RunElsewhere, WorkCurve, PublicReceipt),
    *(NodeOutcome, CheckEvidence, TrustDecision, RolloutSummary),
    TenantsOverview,
)
SECRETS: Final = {"ApiToken": ("token_hash",)}
"""Fields that must not appear in answers, by class name."""
_WHOLE: Final = {"type": "integer", "minimum": 0, "maximum": 2**53}


async def serve(_request: web.Request) -> web.Response:
    """GET /api/v1/openapi.json"""
    return json_response(document())


@cache
def document() -> dict[str, Any]:
    return {
        "openapi": VERSION,
        "info": {
            "title": "Echo hub",
            "version": echo_shared.__version__,
            "description": "Fields of answers are only ever added. Times are seconds since the epoch; numbers that are "
            "not finite are null. Tokens are made by `echo-hub act RUN token NAME`.",
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**answer_schemas(), "Error": _object({"error": {"type": "string"}}), "Answered": _answered()},
        },
        "paths": {**_reads(), **_actions()},
    }


def answer_schemas() -> dict[str, Any]:
    """Return the JSON schema of each class in answers, by class name. It describes the JSON that `responses.jsonable`
    writes."""
    classes = {kind.__name__: kind for top in ANSWERS for kind in _dataclasses_in(top)}
    inputs: list[Any] = [(name, "serialization", TypeAdapter(kind)) for name, kind in classes.items()]
    _, generated = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    schemas: dict[str, Any] = generated["$defs"]
    for name, kind in classes.items():
        _write_arrays(schemas[name]["properties"], kind)
    for name, kind in classes.items():
        _write_as_answered(schemas, schemas[name], kind)
    for schema in schemas.values():
        schema.pop("additionalProperties", None) if schema.get("additionalProperties") is False else None
        if isinstance(schema.get("description"), str):
            schema["description"] = inspect.cleandoc(schema["description"])
    return schemas


def _dataclasses_in(kind: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from _dataclasses_in(hint)
    for part in get_args(kind):
        yield from _dataclasses_in(part)


def _write_arrays(properties: dict[str, Any], kind: Any) -> None:
    """Describe the packed arrays of `kind` as JSON lists of numbers."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if (packed := PackedArray.of(hint)) is not None:
            item = "integer" if np.dtype(packed.dtype).kind == "i" else "number"
            properties[name] = {"type": "array", "items": {"type": item}}


def _write_as_answered(schemas: dict[str, Any], schema: dict[str, Any], kind: Any) -> None:
    """Change the schema of a class to that of the JSON in answers: remove secrets, merge the fields of parts marked as
    flat, and add the properties in ALSO_IN_JSON.
    """
    properties: dict[str, Any] = schema["properties"]
    for secret in SECRETS.get(kind.__name__, ()):
        del properties[secret]
    for field in dataclasses.fields(kind):
        if not field.metadata.get("flat"):
            continue
        flat = properties.pop(field.name)
        if "$ref" in flat:
            inner = schemas[flat["$ref"].rpartition("/")[2]]
            properties.update({name: of_it for name, of_it in inner["properties"].items() if name not in properties})
        else:
            schema["additionalProperties"] = flat["additionalProperties"]
    for name in getattr(kind, "ALSO_IN_JSON", ()):
        hint = get_type_hints(getattr(kind, name).fget)["return"] if isinstance(getattr(kind, name), property) else Any
        properties[name] = TypeAdapter(hint).json_schema(ref_template=_REF)
    schema["required"] = sorted(name for name in properties)


def _reads() -> dict[str, Any]:
    before = _query("before", "Only numbers smaller than this.", _WHOLE)
    return {
        "/api/v1/run": _get("The run now.", _ref(RunView)),
        **_nodes(),
        "/api/v1/steps": _get(
            "The first 1,000 steps after `since`, in order.",
            _list("steps", StepRecord),
            _query("since", "The last known step.", _WHOLE),
        ),
        "/api/v1/log": _get(
            "Events, the newest first.",
            _list("events", RunEvent),
            *(_query(name, "", {"type": "string"}) for name in ("kind", "severity", "subject")),
            before,
            _query("limit", "Largest number of events.", _WHOLE),
        ),
        **_public(),
        "/api/v1/rollouts": _get(
            "Rollouts, newest first.",
            _ref(RolloutsPage),
            *(_query(field.name, "", {}) for field in dataclasses.fields(RolloutFilter)),
            _query("before", "Only rollouts before this one.", {"type": "string"}),
            _query("limit", "Largest number of rollouts.", _WHOLE),
        ),
        "/api/v1/rollouts/{group}": _get("One prompt with all its rollouts.", _ref(GroupView), _path("group")),
        "/api/v1/actions": _get("Operators' actions, the newest 100 first.", _list("actions", ActionRecord), before),
        "/api/v1/tenants": _get("All tenants; only if the hub serves tenants.", _ref(TenantsOverview)),
        "/api/v1/tokens": _get("API tokens; needs a token of scope admin.", _list("tokens", ApiToken)),
    }


def _nodes() -> dict[str, Any]:
    text = {"type": "string"}
    of_fleet = (
        _query("q", "A part of the name, engine, device or invite's name, or a prefix of the id.", text),
        _query("state", "Only nodes in this state.", {"enum": list(STATES)}),
        _query("standing", "Only nodes with this trust standing.", {"enum": list(STANDINGS)}),
        _query("engine", f"{NOT_SAID} = not known.", text),
        _query("precision", f"{NOT_SAID} = not known.", text),
        _query("sort", "", {"enum": [f"{turn}{column.key}" for column in COLUMNS for turn in ("", "-")]}),
        _query("after", "Number of nodes to skip.", _WHOLE),
        _query("limit", "Largest number of nodes; default: all.", {"type": "integer", "minimum": 1}),
    )
    lists = {"outcomes": NodeOutcome, "decisions": TrustDecision, "checked": RolloutSummary, "rollouts": RolloutSummary}
    one = {
        "node": _ref(NodeView),
        "public_key": text,
        "shown": {"anyOf": [_ref(CheckEvidence), {"type": "null"}]},
        **{name: {"type": "array", "items": _ref(kind)} for name, kind in lists.items()},
    }
    listed = _object({"nodes": {"type": "array", "items": _ref(NodeView)}, "found": _WHOLE})
    return {
        "/api/v1/nodes": _get("Connected nodes, and the foremost others.", listed, *of_fleet),
        "/api/v1/nodes/{node}": _get("One node in full.", _object(one), _path("node", text)),
    }


def _public() -> dict[str, Any]:
    of_board = (
        _query("after", "Number of rows to skip.", _WHOLE),
        _query("limit", "Largest number of rows, up to 1,000.", {"type": "integer", "minimum": 1}),
        _query("q", "A part of the name, or a prefix of a node's id.", {"type": "string"}),
        _query("sort", "", {"enum": [*BOARD_ORDERS, *(f"-{order}" for order in BOARD_ORDERS)]}),
    )
    board = {name: _board(name) for name in ("leaderboard", "teams")}
    holder = _object(
        {
            "standing": _ref(CreditStanding),
            "days": {"type": "array", "items": _ref(CreditDay)},
            "elsewhere": {"type": "array", "items": _ref(RunElsewhere)},
            "curve": _ref(WorkCurve),
        }
    )
    text = {"type": "string"}
    return {
        "/api/v1/leaderboard": _get("Nodes by credited work.", board["leaderboard"], *of_board, public=True),
        "/api/v1/teams": _get("Teams by credited work.", board["teams"], *of_board, public=True),
        "/api/v1/leaderboard/nodes/{node}": _get("A node's credit.", holder, _path("node", text), public=True),
        "/api/v1/leaderboard/teams/{team}": _get("A team's credit.", holder, _path("team", text), public=True),
        "/api/v1/receipts/{rollout}": _get("A receipt.", _ref(PublicReceipt), _path("rollout", text), public=True),
    }


def _board(name: str) -> dict[str, Any]:
    return _object({name: {"type": "array", "items": _ref(CreditStanding)}, "found": _WHOLE})


def _actions() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for name, kind in TABLE.items():
        schema = kind.model_json_schema(ref_template=_REF)
        schema.pop("description", None)
        schema["properties"].pop("action")
        body = {"required": bool(schema.get("required")), "content": {"application/json": {"schema": schema}}}
        paths[f"/api/v1/actions/{name}"] = {
            "post": {
                "operationId": name,
                "summary": summary(kind),
                "description": f"Needs a token of scope {kind.SCOPE}.",
                "requestBody": body,
                "responses": _told(),
            }
        }
    paths["/api/v1/actions/{number}/undo"] = {
        "post": {
            "operationId": "undo",
            "summary": "Reverse a finished action.",
            "parameters": [_path("number")],
            "responses": _told(),
        }
    }
    return paths


def _told() -> dict[str, Any]:
    answered = {"content": {"application/json": {"schema": {"$ref": _REF.format(model="Answered")}}}}
    return {
        "200": {"description": "The action is done.", **answered},
        "202": {"description": "The hub has accepted the action and is carrying it out.", **answered},
        "409": {"description": "The action was refused; record.detail says why.", **answered},
        **_errors("400", "401", "403", "404"),
    }


def _errors(*codes: str) -> dict[str, Any]:
    why = {
        "400": "The request is invalid.",
        "401": "The token is missing or wrong.",
        "403": "The token's scope does not permit this.",
        "404": "Not found.",
    }
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {code: {"description": why[code], "content": content} for code in codes}


def _get(what: str, schema: Mapping[str, Any], *parameters: Mapping[str, Any], public: bool = False) -> dict[str, Any]:
    answers = {"200": {"description": what, "content": {"application/json": {"schema": schema}}}}
    errors = _errors("400", "404") if public else _errors("400", "401", "403", "404")
    asked: dict[str, Any] = {"summary": what, "parameters": list(parameters), "responses": {**answers, **errors}}
    return {"get": {**asked, "security": []} if public else asked}


def _query(name: str, what: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": what, "schema": schema}


def _path(name: str, schema: Mapping[str, Any] = _WHOLE) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": _REF.format(model=kind.__name__)}


def _list(name: str, kind: type) -> dict[str, Any]:
    return _object({name: {"type": "array", "items": _ref(kind)}})


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _answered() -> dict[str, Any]:
    secret = {"type": "string", "description": "The new token; it is shown only here."}
    return _object({"record": _ref(ActionRecord), "secret": secret})
