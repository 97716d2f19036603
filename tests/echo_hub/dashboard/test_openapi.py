"""The OpenAPI description is valid, and a real server's answers match it."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientSession
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from echo_hub.actions.requests import TABLE
from echo_hub.dashboard.openapi import document


@pytest.fixture
async def hub(open_hub: Any, source: Any, desk: Any) -> ClientSession:
    session: ClientSession = await open_hub(source, desk=desk)
    return session


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document()["components"]})


async def test_the_description_is_valid_and_has_every_action(hub: ClientSession) -> None:
    async with hub.get("/api/v1/openapi.json") as answer:
        served = await answer.json()
    OpenAPIV31SpecValidator(served).validate()
    actions = {path.rpartition("/")[2] for path in served["paths"] if path.startswith("/api/v1/actions/")}
    assert actions == {*TABLE, "undo"}
    for path, described in served["paths"].items():
        assert ("post" in described) == path.startswith("/api/v1/actions/")


@pytest.mark.parametrize("path", ["run", "nodes", "steps", "log", "leaderboard", "actions", "tokens"])
async def test_answers_are_as_described(hub: ClientSession, desk: Any, path: str) -> None:
    async with hub.post("/api/v1/actions/max_staleness", json={"value": 3}) as answer:
        assert answer.status == 200
    async with hub.post("/api/v1/actions/token", json={"name": "ci"}) as answer:
        assert answer.status == 200
    described = document()["paths"][f"/api/v1/{path}"]["get"]["responses"]["200"]
    async with hub.get(f"/api/v1/{path}") as answer:
        told = await answer.json()
    assert all(told.values()) if path != "run" else told
    validator(described["content"]["application/json"]["schema"]).validate(told)


async def test_a_node_in_full_is_as_described(hub: ClientSession, source: Any) -> None:
    described = document()["paths"]["/api/v1/nodes/{node}"]["get"]["responses"]
    for node_id, status in (((await source.nodes())[0].totals.node_id, 200), ("nobody", 404)):
        async with hub.get(f"/api/v1/nodes/{node_id}") as answer:
            assert answer.status == status
            schema = described[str(status)]["content"]["application/json"]["schema"]
            validator(schema).validate(await answer.json())


async def test_an_actions_answer_matches_the_description(hub: ClientSession) -> None:
    for action, body in (("max_staleness", {"value": 3}), ("evaluate", {}), ("ban", {"node": "x"}), ("ban", {})):
        async with hub.post(f"/api/v1/actions/{action}", json=body) as answer:
            described = document()["paths"][f"/api/v1/actions/{action}"]["post"]["responses"][str(answer.status)]
            validator(described["content"]["application/json"]["schema"]).validate(await answer.json())


def test_described_requests_equal_the_table_of_actions() -> None:
    body = document()["paths"]["/api/v1/actions/max_staleness"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert body["required"] and schema["additionalProperties"] is False
    assert schema["properties"]["value"]["maximum"] == 1000 and "action" not in schema["properties"]
    assert "token_hash" not in document()["components"]["schemas"]["ApiToken"]["properties"]
