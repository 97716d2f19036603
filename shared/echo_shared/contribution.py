"""A certificate of contribution: what one node has done for one run, by the hub's books, signed with the hub's key.

    {"certificate": {"hub_key": "…", "issued_at": "2026-02-03T04:05:06Z", "trained_tokens": 5120, …}, "signature": "…"}

How it is signed and checked, `echo_shared.signed_document` says.
"""

from __future__ import annotations

from typing import Final, Literal

from echo_shared import identity, signed_document
from echo_shared.errors import CodecError
from echo_shared.identity import Identity
from echo_shared.messages.fields import Count, Name, NodeId
from echo_shared.signed_document import Key, Moment, Signed, moment

__all__ = ["MOST_BYTES", "PREFIX", "Contribution", "moment", "sign", "verified"]

PREFIX: Final = b"echo-swarm certificate of contribution 1\0"
MOST_BYTES: Final = 16_384
"""Of the whole document."""
_NAME: Final = "certificate"


class Contribution(Signed):
    """What the hub says. A token is the node's that drew it; all are as of `issued_at`."""

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


def sign(contribution: Contribution, hub: Identity) -> bytes:
    """The document as JSON."""
    return signed_document.sign(contribution, hub, name=_NAME, prefix=PREFIX)


def verified(document: bytes) -> Contribution:
    """What a document says, whose signature is right by the key that it names: the caller decides whether that is the
    hub's. Raises CodecError for all else."""
    what = "certificate of contribution"
    said = signed_document.verified(document, Contribution, name=_NAME, prefix=PREFIX, what=what, most_bytes=MOST_BYTES)
    if identity.node_id(bytes.fromhex(said.node_key)) != said.node_id:
        raise CodecError("The certificate's node id is not that of its node key.", got=said.node_id)
    return said
