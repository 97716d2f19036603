"""Descriptions of fields: the string below each field in the class's body.

Pydantic can read these strings when a class is made (`use_attribute_docstrings`), but this takes a tenth of a process's
start. `Described` reads them only for a JSON schema.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Described(BaseModel):
    """A model whose JSON schema describes each field by the string below it."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, about in cls.descriptions().items():
            if name in properties:
                properties[name].setdefault("description", about)
        return schema

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the string below each attribute, inherited attributes included, by the attribute's name."""
        kinds = cls.__mro__[: cls.__mro__.index(Described)]
        return {name: about for kind in reversed(kinds) for name, about in attribute_docstrings(kind).items()}


@cache
def attribute_docstrings(kind: type[Any]) -> dict[str, str]:
    """Return, by attribute, the string below each attribute in the class's own body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    said: dict[str, str] = {}
    name = ""
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                continue
            case ast.Expr(value=ast.Constant(value=str(about))) if name:
                said[name] = inspect.cleandoc(about)
        name = ""
    return said
