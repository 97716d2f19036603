"""A certificate of contribution: one node's work for one run, from the hub's database, signed with the hub's key.

    {"certificate": {"hub_key": "…", "issued_at": "2026-02-03T04:05:06Z", "trained_tokens": 5120, …}, "signature": "…"}

`echo_shared.signing.signed_document` defines the signature and its check.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from echo_shared.errors import CodecError
from echo_shared.signing import identity, signed_document
from echo_shared.signing.identity import Identity
from echo_shared.signing.signed_document import Key, Moment, Signed, moment
from echo_shared.wire.messages.fields import Count, Name, NodeId

__all__ = ["MOST_BYTES", "PREFIX", "Contribution", "moment", "sign", "verified"]

PREFIX: Final = b"echo-swarm certificate of contribution 1\0"
MOST_BYTES: Final = 16_384
_NAME: Final = "certificate"


class Contribution(Signed):
    """Contents of a certificate. A token counts for the node that drew it. All counts are those at the time
    `issued_at`.
    """

    kind: Literal["echo-swarm contribution"] = "echo-swarm contribution"
    run_id: Name
    run_name: Name
    node_id: NodeId
    node_key: Key
    node_name: Name
    first_seen: Moment
    last_seen: Moment
    issued_at: Moment
    trained_rollouts: Count
    """Rollouts that the policy was trained on."""
    trained_tokens: Count
    evaluated_rollouts: Count
    """Rollouts used to evaluate a version."""
    evaluated_tokens: Count
    answered_rollouts: Count = 0
    """Rollouts delivered to tenants (users of the hub's API). A certificate with 0 such rollouts contains neither this
    field nor `answered_tokens`, so that older releases can verify it.
    """
    answered_tokens: Count = 0
    checks_passed: Count
    """Rollouts of this node that a check of the hub confirmed."""
    checks_failed: Count
    others_checked_rollouts: Count
    """Rollouts of other nodes that this node checked for the hub."""
    others_checked_tokens: Count

    @model_serializer(mode="wrap")
    def _without_zeros(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        said: dict[str, Any] = handler(self)
        if not self.answered_rollouts and not self.answered_tokens:
            del said["answered_rollouts"], said["answered_tokens"]
        return said


def sign(contribution: Contribution, hub: Identity) -> bytes:
    """Add the hub's signature; return the document as JSON."""
    return signed_document.sign(contribution, hub, name=_NAME, prefix=PREFIX)


def verified(document: bytes) -> Contribution:
    """Return the contents of a document whose signature matches the key that the document names.

    The caller must check that this key is the hub's. Raises CodecError for any other document.
    """
    what = "certificate of contribution"
    said = signed_document.verified(document, Contribution, name=_NAME, prefix=PREFIX, what=what, most_bytes=MOST_BYTES)
    if identity.node_id(bytes.fromhex(said.node_key)) != said.node_id:
        raise CodecError("The certificate's node id does not belong to its node key.", got=said.node_id)
    return said
