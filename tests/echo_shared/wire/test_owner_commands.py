from __future__ import annotations

import pytest

from echo_shared.errors import RemoteProtocolError
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import FleetCommand, FleetReport
from echo_shared.wire.owner_commands import (
    LINE_CHARACTERS,
    NodeReport,
    OwnerCommand,
    id_of,
    read_command,
    read_report,
    sign_command,
    sign_report,
)

OWNER, NODE = Identity.generate(), Identity.generate()
PAUSE = OwnerCommand(verb="pause", pause_s=60.0, hub_key="ab" * 32, to=("a",), sender="b", sent_at=5.0)
REPORT = NodeReport(state="paused", reason="Its owner has paused it.", tokens_per_s=3.5)


def test_a_command_is_read_with_its_owner_s_key_only() -> None:
    said = sign_command(PAUSE, OWNER)
    assert read_command(said, OWNER.public_key) == PAUSE
    with pytest.raises(RemoteProtocolError, match="not signed with this owner's key"):
        read_command(said, NODE.public_key)
    with pytest.raises(RemoteProtocolError, match="not signed"):
        read_command(said.model_copy(update={"body": said.body.replace(b"pause", b"resum")}), OWNER.public_key)


def test_a_report_is_read_as_its_node_s_answer_to_its_command_only() -> None:
    said = sign_report(REPORT, b"1" * 16, NODE)
    assert read_report(said, b"1" * 16, NODE.public_key) == REPORT
    for command_id, key in ((b"2" * 16, NODE.public_key), (b"1" * 16, OWNER.public_key)):
        with pytest.raises(RemoteProtocolError, match="not signed by its node"):
            read_report(said, command_id, key)


def test_a_node_s_signature_is_no_owner_s_and_the_reverse() -> None:
    """A report's signature must never be valid for a command, and the reverse."""
    report = sign_report(REPORT, b"1" * 16, OWNER)
    with pytest.raises(RemoteProtocolError):
        read_command(FleetCommand(body=report.body, signature=report.signature), OWNER.public_key)
    command = sign_command(PAUSE, OWNER)
    taken = FleetReport(command_id=b"1" * 16, body=command.body, signature=command.signature)
    with pytest.raises(RemoteProtocolError):
        read_report(taken, b"1" * 16, OWNER.public_key)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"verb": "wipe"}', PAUSE.model_dump_json().replace("60.0", "1e308").encode()]
)
def test_contents_that_are_not_understood_are_named(body: bytes) -> None:
    said = FleetCommand(body=body, signature=OWNER.sign(b"echo owner's command 1\0" + body))
    with pytest.raises(RemoteProtocolError, match="does not understand"):
        read_command(said, OWNER.public_key)


def test_reports_are_lines_that_a_terminal_can_show() -> None:
    assert NodeReport(state="\x1b[2J\n").state == "?[2J?"
    longest = NodeReport(**dict.fromkeys(("problem", "state", "reason", "device", "version"), "x" * LINE_CHARACTERS))
    sign_report(longest, b"1" * 16, NODE)


def test_commands_that_differ_have_different_ids() -> None:
    later = PAUSE.model_copy(update={"sent_at": 6.0})
    assert id_of(sign_command(PAUSE, OWNER)) != id_of(sign_command(later, OWNER))
