"""Credit of one run, signed with its hub's key, so that another hub can add it to a node's total.

    {"credit": {"hub_key": "…", "run_id": "…", "nodes": [{"node_id": "…", "rollouts": 12, "tokens": 3456}, …]},
     "signature": "…"}

A run's id begins with its hub's id, which is derived from the hub's key, so no other hub can sign for the run.
`echo_shared.signing.signed_document` defines the signature and its check.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo_shared.errors import CodecError
from echo_shared.signing import identity, signed_document
from echo_shared.signing.identity import Identity
from echo_shared.signing.signed_document import Moment, Signed
from echo_shared.wire.messages.fields import Count, Name, NodeId

PREFIX: Final = b"echo-swarm credit of a run 1\0"
MOST_BYTES: Final = 64 * 2**20
MOST_NODES: Final = 200_000
_NAME: Final = "credit"


class NodeCredit(BaseModel):
    """Credit of one node in this run."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    node_id: NodeId
    node_name: Name
    rollouts: Count
    """Rollouts trained on or evaluated."""
    tokens: Count
    """Tokens that this node drew, counting only rollouts that were trained on or evaluated."""


class RunCredit(Signed):
    """Contents of the signed credit of one run, as of `issued_at`."""

    kind: Literal["echo-swarm credit"] = "echo-swarm credit"
    run_id: Name
    run_name: Name
    issued_at: Moment
    nodes: Annotated[tuple[NodeCredit, ...], Field(max_length=MOST_NODES)]
    """Nodes in order of id, without duplicates."""


def sign(credit: RunCredit, hub: Identity) -> bytes:
    """Add the hub's signature; return the document as JSON."""
    return signed_document.sign(credit, hub, name=_NAME, prefix=PREFIX)


def verified(document: bytes) -> RunCredit:
    """Return the contents of a document that the run's own hub signed.

    The caller decides which hubs to trust. Raises CodecError for any other document.
    """
    said = signed_document.verified(
        document, RunCredit, name=_NAME, prefix=PREFIX, what="credit of a run", most_bytes=MOST_BYTES
    )
    if not said.run_id.startswith(f"{identity.node_id(bytes.fromhex(said.hub_key))}-"):
        raise CodecError("The run does not belong to the hub that signed its credit.", got=said.run_id)
    ids = [node.node_id for node in said.nodes]
    if ids != sorted(set(ids)):
        raise CodecError("The nodes of a run's credit must be sorted by id, without duplicates.", got=said.run_id)
    return said
