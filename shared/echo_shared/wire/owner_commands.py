"""Commands and reports that an owner's machines send each other through a hub.

A command is signed with the owner's key, a report with the key of the node that made it. Both are JSON.

The signature covers a fixed prefix and the JSON text exactly as it was received. A command names its hub, its receivers
and its time: a hub cannot redirect it to another node, and a node does not obey an old one
(`echo_node.core.owner_commands`).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from echo_shared.errors import RemoteProtocolError
from echo_shared.signing.identity import Identity, verify
from echo_shared.signing.signed_document import Key
from echo_shared.wire.messages import COMMAND_ID_BYTES, FleetCommand, FleetReport
from echo_shared.wire.messages.fields import NodeId, printable_line

_COMMAND: Final = b"echo owner's command 1\0"
_REPORT: Final = b"echo node's report 1\0"
MOST_NAMED: Final = 32
"""Maximum number of nodes that one command names."""
LONGEST_PAUSE_S: Final = 366 * 86_400.0

LINE_CHARACTERS: Final = 400
"""Maximum length of a line of text in a report."""
Line = Annotated[str, Field(max_length=LINE_CHARACTERS), AfterValidator(printable_line)]


class _Said(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


_SaidType = TypeVar("_SaidType", bound=_Said)


class OwnerCommand(_Said):
    """A command of the owner."""

    verb: Literal["status", "pause", "resume"]
    pause_s: Annotated[float, Field(gt=0, le=LONGEST_PAUSE_S)] | None = None
    """Length of a pause in seconds; None = until resumed."""
    hub_key: Key
    to: Annotated[tuple[NodeId, ...], Field(strict=False, max_length=MOST_NAMED)] = ()
    """Nodes that must obey; empty = all of the owner's nodes."""
    sender: NodeId
    sent_at: Annotated[float, Field(ge=0)]
    """Time on the sender's clock, in seconds since the epoch. Every command of a sender carries a later time than its
    previous command.
    """


class NodeReport(_Said):
    """State of a node after a command, for its owner."""

    problem: Line = ""
    """What went wrong; empty = the node has obeyed."""
    name: Line = ""
    """The node's name, by which its owner addresses it."""
    state: Line = ""
    """State in one word, as in `echo-node status`, and the `reason` in a sentence."""
    reason: Line = ""
    device: Line = ""
    tokens_per_s: Annotated[float, Field(ge=0)] | None = None
    """Tokens drawn per second over the last minute; None = unknown."""
    drawn_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens drawn since the node's start."""
    version: Line = ""
    """Version of the node's software."""


def sign_command(command: OwnerCommand, owner: Identity) -> FleetCommand:
    body = command.model_dump_json().encode()
    return FleetCommand(body=body, signature=owner.sign(_COMMAND + body))


def is_signed(said: FleetCommand, owner_key: bytes) -> bool:
    """Return True if the owner with this public key has signed the command."""
    return verify(owner_key, said.signature, _COMMAND + said.body)


def read_command(said: FleetCommand, owner_key: bytes) -> OwnerCommand:
    """Return the command in a message. Raises RemoteProtocolError unless the owner with this public key signed it."""
    if not is_signed(said, owner_key):
        raise RemoteProtocolError("The command is not signed with this owner's key.")
    return _parsed(said.body, OwnerCommand)


def id_of(said: FleetCommand) -> bytes:
    """Return the command's id, by which its reports are recognised."""
    return hashlib.blake2b(said.body + said.signature, digest_size=COMMAND_ID_BYTES).digest()


def sign_report(report: NodeReport, command_id: bytes, node: Identity) -> FleetReport:
    body = report.model_dump_json().encode()
    return FleetReport(command_id=command_id, body=body, signature=node.sign(_REPORT + command_id + body))


def read_report(said: FleetReport, command_id: bytes, node_key: bytes) -> NodeReport:
    """Return the report in a message. Raises RemoteProtocolError unless the node with this public key has signed it as
    its answer to this command.
    """
    if said.command_id != command_id or not verify(node_key, said.signature, _REPORT + command_id + said.body):
        raise RemoteProtocolError("The report is not signed by its node.")
    return _parsed(said.body, NodeReport)


def _parsed(body: bytes, kind: type[_SaidType]) -> _SaidType:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        got = f"{place or 'its contents'}: {first['msg']}"
        raise RemoteProtocolError(
            "Another machine of the owner sent something that this one does not understand.",
            got=printable_line(got),
            do="Use the same version of Echo on all of the owner's machines.",
        ) from error
