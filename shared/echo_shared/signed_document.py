"""What a hub says and signs, as a JSON document that anyone can check who has its key, without the hub and for ever.

    {"certificate": {…, "hub_key": "…"}, "signature": "…"}

Signed are a fixed prefix, one for each kind of document, and what is said as JSON in UTF-8 with sorted keys and no
spaces. It holds text and whole numbers alone, so there is one such form.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from echo_shared import identity
from echo_shared.errors import CodecError
from echo_shared.identity import Identity

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Ed25519, in hexadecimal."""
_SIGNATURE: Final = "signature"


class Signed(BaseModel):
    """What all of them say."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    hub_key: Key
    """Ed25519, in hexadecimal; it has signed."""


_Said = TypeVar("_Said", bound=Signed)


def _is_a_moment(text: str) -> str:
    datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    return text


Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"), AfterValidator(_is_a_moment)]
"""In UTC, to the second."""


def moment(seconds: float) -> str:
    """Seconds since the epoch as a `Moment`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sign(said: Signed, hub: Identity, *, name: str, prefix: bytes) -> bytes:
    """The document as JSON; `name` is that of the field for what is said."""
    signature = hub.sign(prefix + _canonical(said)).hex()
    document = {name: said.model_dump(mode="json"), _SIGNATURE: signature}
    return f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode()


def verified(document: bytes, kind: type[_Said], *, name: str, prefix: bytes, what: str, most_bytes: int) -> _Said:
    """What a document says, whose signature is right by the key that it names: the caller decides whether that is the
    hub's. Raises CodecError for all else, in which `what` is what it should have been."""
    not_one = f"This is no {what}."
    if len(document) > most_bytes:
        raise CodecError(not_one, got=f"{len(document)} bytes")
    try:
        found = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CodecError(not_one, got=f"all of it: {error}") from error
    if not isinstance(found, dict) or set(found) != {name, _SIGNATURE}:
        raise CodecError(not_one, got=f"all of it: {name} and {_SIGNATURE} are not what it has")
    said = _parsed(found[name], kind, not_one)
    key, signature = bytes.fromhex(said.hub_key), _hexadecimal(found[_SIGNATURE])
    if not identity.verify(key, signature, prefix + _canonical(said)):
        raise CodecError(f"The signature is wrong: somebody has changed the {what}, or made it up.", got=said.hub_key)
    return said


def _parsed(value: Any, kind: type[_Said], not_one: str) -> _Said:
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CodecError(not_one, got=f"{place or 'all of it'}: {first['msg']}") from error


def _hexadecimal(value: Any) -> bytes:
    """Empty where it is none, which no signature is."""
    try:
        return bytes.fromhex(value) if isinstance(value, str) and len(value) == 128 else b""
    except ValueError:
        return b""


def _canonical(said: Signed) -> bytes:
    fields = said.model_dump(mode="json")
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
