"""The credit of one run, as its hub's key signs it: what every node has done that counted, to add up on another hub.

    {"credit": {"hub_key": "…", "run_id": "…", "nodes": [{"node_id": "…", "rollouts": 12, "tokens": 3456}, …]},
     "signature": "…"}

A run's id begins with its hub's own id, which follows from the hub's key: so no other hub can speak for a run. How it
is signed and checked, `echo_shared.signed_document` says.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo_shared import identity, signed_document
from echo_shared.errors import CodecError
from echo_shared.identity import Identity
from echo_shared.messages.fields import Count, Name, NodeId
from echo_shared.signed_document import Moment, Signed

PREFIX: Final = b"echo-swarm credit of a run 1\0"
MOST_BYTES: Final = 64 * 2**20
"""Of the whole document."""
MOST_NODES: Final = 200_000
_NAME: Final = "credit"


class NodeCredit(BaseModel):
    """One node's."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    node_id: NodeId
    node_name: Name
    rollouts: Count
    """That were trained on or evaluated."""
    tokens: Count
    """That it drew of such rollouts."""


class RunCredit(Signed):
    """What the hub says, as of `issued_at`."""

    kind: Literal["echo-swarm credit"] = "echo-swarm credit"
    run_id: Name
    run_name: Name
    issued_at: Moment
    nodes: Annotated[tuple[NodeCredit, ...], Field(max_length=MOST_NODES)]
    """Each once, by their ids."""


def sign(credit: RunCredit, hub: Identity) -> bytes:
    """The document as JSON."""
    return signed_document.sign(credit, hub, name=_NAME, prefix=PREFIX)


def verified(document: bytes) -> RunCredit:
    """What a document says of a run that is its signer's. Whether that hub is to be believed, the caller decides.
    Raises CodecError for all else."""
    said = signed_document.verified(
        document, RunCredit, name=_NAME, prefix=PREFIX, what="credit of a run", most_bytes=MOST_BYTES
    )
    if not said.run_id.startswith(f"{identity.node_id(bytes.fromhex(said.hub_key))}-"):
        raise CodecError("The run is not of the hub that has signed its credit.", got=said.run_id)
    ids = [node.node_id for node in said.nodes]
    if ids != sorted(set(ids)):
        raise CodecError("The nodes of a run's credit must be in the order of their ids, each once.", got=said.run_id)
    return said
