"""What scripts may ask this hub for, as OpenAPI 3.1: GET /api/v1/openapi.json.

Made of the very classes that requests are checked by and answers are made of, so that it cannot say anything else.
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
from echo_shared.books import RunEvent, StepRecord
from echo_shared.credit_books import BOARD_ORDERS, CreditDay, PublicReceipt, RunElsewhere, Standing
from echo_shared.messages.fields import PackedArray
from echo_shared.node_books import CheckEvidence, NodeOutcome, TrustDecision
from echo_shared.rollout_books import GroupView, RolloutFilter, RolloutsPage, RolloutSummary

VERSION: Final = "3.1.0"
_REF: Final = "#/components/schemas/{model}"
ANSWERS: Final = (
    *(RunView, NodeView, StepRecord, RunEvent, RolloutsPage, GroupView, ActionRecord, ApiToken),
    *(Standing, CreditDay, RunElsewhere, WorkCurve, PublicReceipt),
    *(NodeOutcome, CheckEvidence, TrustDecision, RolloutSummary),
)
SECRETS: Final = {"ApiToken": ("token_hash",)}
"""Fields that no answer has."""
_WHOLE: Final = {"type": "integer", "minimum": 0, "maximum": 2**53}


async def serve(_request: web.Request) -> web.Response:
    """GET /api/v1/openapi.json"""
    return json_response(document())


@cache
def document() -> dict[str, Any]:
    """The whole description."""
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
    """A JSON schema of each class that answers are made of, by its name, as `responses.jsonable` writes them."""
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
    """The class and those in its fields, however deep."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from _dataclasses_in(hint)
    for part in get_args(kind):
        yield from _dataclasses_in(part)


def _write_arrays(properties: dict[str, Any], kind: Any) -> None:
    """Describe arrays as lists of numbers."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if (packed := PackedArray.of(hint)) is not None:
            item = "integer" if np.dtype(packed.dtype).kind == "i" else "number"
            properties[name] = {"type": "array", "items": {"type": item}}


def _write_as_answered(schemas: dict[str, Any], schema: dict[str, Any], kind: Any) -> None:
    """Flat fields' items stand among the others, and some properties do, too."""
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
    before = _query("before", "Of smaller numbers than this.", _WHOLE)
    return {
        "/api/v1/run": _get("The run now.", _ref(RunView)),
        **_nodes(),
        "/api/v1/steps": _get(
            "The first 1,000 steps after one, in order.",
            _list("steps", StepRecord),
            _query("since", "The last step that you have.", _WHOLE),
        ),
        "/api/v1/log": _get(
            "What has happened, the newest first.",
            _list("events", RunEvent),
            *(_query(name, "", {"type": "string"}) for name in ("kind", "severity", "subject")),
            before,
            _query("limit", "So many at most.", _WHOLE),
        ),
        **_public(),
        "/api/v1/rollouts": _get(
            "Rollouts, newest first.",
            _ref(RolloutsPage),
            *(_query(field.name, "", {}) for field in dataclasses.fields(RolloutFilter)),
            _query("before", "Of those before this rollout.", {"type": "string"}),
            _query("limit", "So many at most.", _WHOLE),
        ),
        "/api/v1/rollouts/{group}": _get("One prompt, and all that was drawn of it.", _ref(GroupView), _path("group")),
        "/api/v1/actions": _get("What operators did, the newest 100 first.", _list("actions", ActionRecord), before),
        "/api/v1/tokens": _get("Tokens of scripts; takes one of scope admin.", _list("tokens", ApiToken)),
    }


def _nodes() -> dict[str, Any]:
    text = {"type": "string"}
    of_fleet = (
        _query("q", "A part of the name, engine, device or invite's name, or the start of the id.", text),
        _query("state", "Those that do this.", {"enum": list(STATES)}),
        _query("standing", "Those that the hub thinks this of.", {"enum": list(STANDINGS)}),
        _query("engine", f"{NOT_SAID} = not known.", text),
        _query("precision", f"{NOT_SAID} = not known.", text),
        _query("sort", "", {"enum": [f"{turn}{column.key}" for column in COLUMNS for turn in ("", "-")]}),
        _query("after", "So many are left out at the front.", _WHOLE),
        _query("limit", "So many at most; all, if it is left out.", {"type": "integer", "minimum": 1}),
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
        "/api/v1/nodes": _get("Nodes: those that are connected, and the foremost others.", listed, *of_fleet),
        "/api/v1/nodes/{node}": _get("All that is known of one node.", _object(one), _path("node", text)),
    }


def _public() -> dict[str, Any]:
    of_board = (
        _query("after", "So many rows are left out at the front.", _WHOLE),
        _query("limit", "So many at most, and 1,000.", {"type": "integer", "minimum": 1}),
        _query("q", "A part of the name, or the start of a node's id.", {"type": "string"}),
        _query("sort", "", {"enum": [*BOARD_ORDERS, *(f"-{order}" for order in BOARD_ORDERS)]}),
    )
    board = {name: _board(name) for name in ("leaderboard", "teams")}
    holder = _object(
        {
            "standing": _ref(Standing),
            "days": {"type": "array", "items": _ref(CreditDay)},
            "elsewhere": {"type": "array", "items": _ref(RunElsewhere)},
            "curve": _ref(WorkCurve),
        }
    )
    text = {"type": "string"}
    return {
        "/api/v1/leaderboard": _get("Nodes by what counted.", board["leaderboard"], *of_board, public=True),
        "/api/v1/teams": _get("Teams by what counted.", board["teams"], *of_board, public=True),
        "/api/v1/leaderboard/nodes/{node}": _get("A node.", holder, _path("node", text), public=True),
        "/api/v1/leaderboard/teams/{team}": _get("A team.", holder, _path("team", text), public=True),
        "/api/v1/receipts/{rollout}": _get("A rollout's.", _ref(PublicReceipt), _path("rollout", text), public=True),
    }


def _board(name: str) -> dict[str, Any]:
    return _object({name: {"type": "array", "items": _ref(Standing)}, "found": _WHOLE})


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
                "description": f"Takes a token of scope {kind.SCOPE}.",
                "requestBody": body,
                "responses": _told(),
            }
        }
    paths["/api/v1/actions/{number}/undo"] = {
        "post": {
            "operationId": "undo",
            "summary": "Do what takes a done action back.",
            "parameters": [_path("number")],
            "responses": _told(),
        }
    }
    return paths


def _told() -> dict[str, Any]:
    answered = {"content": {"application/json": {"schema": {"$ref": _REF.format(model="Answered")}}}}
    return {
        "200": {"description": "It is done.", **answered},
        "202": {"description": "The hub has it, and is at it.", **answered},
        "409": {"description": "It was refused; record.detail says why.", **answered},
        **_errors("400", "401", "403", "404"),
    }


def _errors(*codes: str) -> dict[str, Any]:
    why = {
        "400": "This cannot be.",
        "401": "A token is missing, or wrong.",
        "403": "The token is not good for this.",
        "404": "There is no such thing.",
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
    secret = {"type": "string", "description": "The token that was made; nowhere else is it told."}
    return _object({"record": _ref(ActionRecord), "secret": secret})
