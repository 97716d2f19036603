"""JSON documents signed by a hub. Anyone with the hub's key can check them, offline and at any time.

    {"certificate": {…, "hub_key": "…"}, "signature": "…"}

The signature covers a fixed prefix, one per kind of document, and the contents as JSON in UTF-8 with sorted keys and no
spaces. Contents are texts and integers only, so the same contents always give the same JSON.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from echo_shared.errors import CodecError
from echo_shared.signing import identity
from echo_shared.signing.identity import Identity

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Ed25519 public key, hexadecimal."""
_SIGNATURE: Final = "signature"


class Signed(BaseModel):
    """Fields of every signed document."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    hub_key: Key
    """Ed25519 public key of the signer, hexadecimal."""


_Said = TypeVar("_Said", bound=Signed)


def _is_a_moment(text: str) -> str:
    datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    return text


Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"), AfterValidator(_is_a_moment)]
"""UTC time, to the second."""


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sign(said: Signed, hub: Identity, *, name: str, prefix: bytes) -> bytes:
    """Return the signed document as JSON, with the contents of `said` under the key `name`."""
    signature = hub.sign(prefix + _canonical(said)).hex()
    document = {name: said.model_dump(mode="json"), _SIGNATURE: signature}
    return f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode()


def verified(document: bytes, kind: type[_Said], *, name: str, prefix: bytes, what: str, most_bytes: int) -> _Said:
    """Return the contents of a document whose signature matches the key that the document names.

    The caller must check that this key is the hub's. Raises CodecError for any other document; `what` names the
    expected kind of document in its text.
    """
    not_one = f"This is no {what}."
    if len(document) > most_bytes:
        raise CodecError(not_one, got=f"{len(document)} bytes")
    try:
        found = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CodecError(not_one, got=f"not JSON: {error}") from error
    if not isinstance(found, dict) or set(found) != {name, _SIGNATURE}:
        raise CodecError(not_one, got=f"its keys are not {name} and {_SIGNATURE}")
    said = _parsed(found[name], kind, not_one)
    key, signature = bytes.fromhex(said.hub_key), _hexadecimal(found[_SIGNATURE])
    if not identity.verify(key, signature, prefix + _canonical(said)):
        raise CodecError(f"The signature is wrong: the {what} was changed or forged.", got=said.hub_key)
    return said


def _parsed(value: Any, kind: type[_Said], not_one: str) -> _Said:
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CodecError(not_one, got=f"{place or 'its contents'}: {first['msg']}") from error


def _hexadecimal(value: Any) -> bytes:
    """Decode a signature; return b"", which never verifies, if it is malformed."""
    try:
        return bytes.fromhex(value) if isinstance(value, str) and len(value) == 128 else b""
    except ValueError:
        return b""


def _canonical(said: Signed) -> bytes:
    fields = said.model_dump(mode="json")
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
