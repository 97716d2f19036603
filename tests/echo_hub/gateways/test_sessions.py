from __future__ import annotations

from types import SimpleNamespace

import pytest

from echo_hub.gateways import sessions as sessions_module
from echo_hub.gateways.sessions import GatewayLine, GatewaySessions
from echo_hub.net.send_queue import Rank
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import FromHub, Piece
from tests.echo_hub.net.gateway_parts import revoked


def known(*names: str) -> tuple[GatewaySessions, list[GatewayLine]]:
    sessions = GatewaySessions()
    lines = [GatewayLine(name, heard_at=0.0) for name in names]
    sessions.lines = {line.gateway_id: line for line in lines}
    return sessions, lines


def test_the_end_of_an_old_session_does_not_end_the_new_one() -> None:
    sessions, (one, other) = known("one", "other")
    first = sessions.begin("a", one)
    sessions.end("a")
    second = sessions.begin("a", other)
    assert second.number > first.number
    assert sessions.current("a", second.number) and not sessions.current("a", first.number)
    assert sessions.left(first.number) is None and "a" in sessions
    assert sessions.left(second.number) == "a" and "a" not in sessions
    assert not one.sessions and not other.sessions


def test_a_lost_gateway_removes_exactly_its_nodes() -> None:
    sessions, (one, other) = known("one", "other")
    for node_id, line in (("a", one), ("b", one), ("c", other)):
        sessions.begin(node_id, line)
    assert sessions.end_line(one) == ["a", "b"]
    assert ("a" in sessions, "b" in sessions, list(sessions.lines), one.is_over) == (False, False, ["other"], True)
    assert not sessions.send("a", revoked(1)) and sessions.send("c", revoked(1))


def test_pushes_are_made_in_turn_and_only_for_connected_nodes() -> None:
    sessions, (line,) = known("one")
    sessions.begin("a", line)
    sessions.begin("b", line)
    made: list[str] = []

    def push(node_id: str, name: str, rank: Rank, message: FromHub | None) -> bool:
        def build() -> FromHub | None:
            made.append(name)
            return message

        return sessions.push(node_id, SimpleNamespace(build=build), rank)

    assert push("a", "late", (0, True), revoked(1))
    assert push("b", "gone", (0, False), revoked(2))
    assert push("a", "first", (-1, True), revoked(3))
    assert push("a", "useless", (-1, True), None)
    sessions.end("b")
    assert not made, "nothing is made before its turn"
    while line.pushes:
        line.make_push()
    assert made == ["first", "useless", "late"]
    assert [item[2] for item in line.outbox.take(2**20)] == [encode(revoked(3)), encode(revoked(1))]
    assert not push("b", "gone", (0, False), revoked(2))


def test_a_gateway_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = Piece(info_hash=bytes(20), index=0, data=bytes(900))
    monkeypatch.setattr(sessions_module, "WAITING_BYTES", 1_500)
    sessions, (line,) = known("one")
    sessions.begin("a", line)
    assert sessions.send("a", piece) and not line.is_over
    sessions.send("a", piece)
    assert line.is_over and not sessions.send("a", piece)
