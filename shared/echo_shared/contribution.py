"""A certificate of contribution: what one node has done for one run, by the hub's books, signed with the hub's key.

    {"certificate": {"hub_key": "…", "issued_at": "2026-02-03T04:05:06Z", "trained_tokens": 5120, …}, "signature": "…"}

Signed are a fixed prefix and the certificate as JSON in UTF-8 with sorted keys and no spaces. It holds text and whole
numbers alone, so there is one such form. Whoever has the hub's key can check it, without the hub and for ever.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from echo_shared import identity
from echo_shared.errors import CodecError
from echo_shared.identity import Identity
from echo_shared.messages.fields import Count, Name, NodeId

PREFIX: Final = b"echo-swarm certificate of contribution 1\0"
MOST_BYTES: Final = 16_384
"""Of the whole document."""

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _is_a_moment(text: str) -> str:
    datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    return text


Moment = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"), AfterValidator(_is_a_moment)]
"""In UTC, to the second."""


class Contribution(BaseModel):
    """What the hub says. A token is the node's that drew it; all are as of `issued_at`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["echo-swarm contribution"] = "echo-swarm contribution"
    run_id: Name
    run_name: Name
    hub_key: Key
    """Ed25519, in hexadecimal; it has signed."""
    node_id: NodeId
    node_key: Key
    node_name: Name
    first_seen: Moment
    last_seen: Moment
    issued_at: Moment
    trained_rollouts: Count
    """That the policy was trained on."""
    trained_tokens: Count
    evaluated_rollouts: Count
    """That have shown how good a version is."""
    evaluated_tokens: Count
    checks_passed: Count
    """Rollouts that were computed again and found to be drawn honestly."""
    checks_failed: Count
    others_checked_rollouts: Count
    """Of other nodes, which this one computed again for the hub."""
    others_checked_tokens: Count


class _Document(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    certificate: Contribution
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def moment(seconds: float) -> str:
    """Seconds since the epoch as a `Moment`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sign(contribution: Contribution, hub: Identity) -> bytes:
    """The document as JSON."""
    signature = hub.sign(PREFIX + _canonical(contribution)).hex()
    document = _Document(certificate=contribution, signature=signature)
    return f"{json.dumps(document.model_dump(), indent=2, ensure_ascii=False)}\n".encode()


def verified(document: bytes) -> Contribution:
    """What a document says, whose signature is right by the key that it names: the caller decides whether that is the
    hub's. Raises CodecError for all else."""
    if len(document) > MOST_BYTES:
        raise CodecError("This is no certificate of contribution.", got=f"{len(document)} bytes")
    try:
        found = _Document.model_validate_json(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        got = ".".join(str(part) for part in first["loc"])
        raise CodecError(
            "This is no certificate of contribution.", got=f"{got or 'all of it'}: {first['msg']}"
        ) from error
    said, key = found.certificate, bytes.fromhex(found.certificate.hub_key)
    if not identity.verify(key, bytes.fromhex(found.signature), PREFIX + _canonical(said)):
        raise CodecError(
            "The signature is wrong: somebody has changed the certificate, or made it up.", got=said.hub_key
        )
    if identity.node_id(bytes.fromhex(said.node_key)) != said.node_id:
        raise CodecError("The certificate's node id is not that of its node key.", got=said.node_id)
    return said


def _canonical(contribution: Contribution) -> bytes:
    fields = contribution.model_dump()
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
