"""Reference of the hub's HTTP API, generated from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo_hub.dashboard.openapi import document
from scripts.docs.field_types import number
from scripts.docs.markdown import code, paragraphs, table, text


def page() -> str:
    """Return a page with all paths and then all objects in responses."""
    described = document()
    about: str = described["info"]["description"]
    paths = [
        _operation(method.upper(), path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = described["components"]["schemas"]
    return (
        "# HTTP API\n\n"
        "`/api/v1/openapi.json` is the machine-readable form, OpenAPI 3.1.\n\n"
        + about
        + "\n\nA refused request is answered with an [Error](#error): 400 for an invalid request, 401 for a missing or "
        "wrong token, 403 for a token without permission, 404 for an unknown object.\n\n"
        + "## Paths\n\n"
        + "".join(paths)
        + "## Objects\n\n"
        + "".join(_object(name, schemas[name]) for name in sorted(schemas))
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    about = " ".join(part for part in (operation.get("summary"), operation.get("description")) if part)
    public = " No token needed." if operation.get("security") == [] else ""
    parameters = [
        (code(one["name"]), one["in"], _schema(one["schema"]), text(one.get("description")))
        for one in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    required = body.get("required", [])
    parameters += [
        (
            code(name),
            "body",
            _schema(schema) + ("" if name in required else ", optional"),
            text(schema.get("description")),
        )
        for name, schema in body.get("properties", {}).items()
    ]
    answers = [
        (status, _schema(answer["content"]["application/json"]["schema"]), text(answer["description"]))
        for status, answer in operation["responses"].items()
        if answer["content"]["application/json"]["schema"] != {"$ref": "#/components/schemas/Error"}
    ]
    return (
        f"### {code(f'{method} {path}')}\n\n{text(about)}{public}\n\n"
        + table(("parameter", "in", "type", "meaning"), parameters)
        + table(("status", "answer", "when"), answers)
    )


def _object(name: str, schema: Mapping[str, Any]) -> str:
    title = f"### {name}\n\n{paragraphs(schema.get('description'))}"
    if "enum" in schema:
        return title + "One of " + ", ".join(code(str(value)) for value in schema["enum"]) + ".\n\n"
    rows = [
        (code(field), _schema(of_field), text(of_field.get("description")))
        for field, of_field in schema.get("properties", {}).items()
    ]
    return title + table(("field", "type", "meaning"), rows)


def _schema(schema: Mapping[str, Any]) -> str:
    """Return a description of a JSON schema in words, as Markdown."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema or "const" in schema:
        return " or ".join(code(str(value)) for value in schema.get("enum", [schema.get("const")]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(map(_schema, schema[several])))
    if schema.get("type") == "array":
        items = schema.get("prefixItems")
        return f"[{'; '.join(map(_schema, items))}]" if items else f"list of {_schema(schema.get('items', {}))}"
    if schema.get("type") == "object":
        if "properties" in schema:
            return "{" + ", ".join(f"{code(key)}: {_schema(one)}" for key, one in schema["properties"].items()) + "}"
        more = schema.get("additionalProperties", {})
        return f"table of {_schema(more) if isinstance(more, Mapping) else 'anything'}"
    return str(schema.get("type", "anything")) + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    return "".join(f", {word} {number(schema[key])}" for key, word in words.items() if key in schema)
