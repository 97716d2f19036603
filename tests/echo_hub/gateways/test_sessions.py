from __future__ import annotations

import pytest

from echo_hub.gateways import sessions as sessions_module
from echo_hub.gateways.items import ItemKind
from echo_hub.gateways.sessions import GatewayLine, GatewaySessions
from echo_hub.net.send_queue import MakePush


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
    assert (len(sessions), list(sessions.lines), one.is_over) == (1, ["other"], True)
    assert not sessions.say("a", ItemKind.SEND, b"x") and sessions.say("c", ItemKind.SEND, b"x")


def test_pushes_are_made_in_turn_and_only_for_connected_nodes() -> None:
    sessions, (line,) = known("one")
    sessions.begin("a", line)
    sessions.begin("b", line)
    made: list[str] = []

    def make(name: str, frame: bytes | None) -> MakePush:
        def make_it() -> bytes | None:
            made.append(name)
            return frame

        return make_it

    for node_id, rank, frame in (("a", (0, True), b"late"), ("b", (0, False), b"x"), ("a", (-1, True), b"first")):
        assert sessions.push(node_id, rank, make(frame.decode(), frame))
    assert sessions.push("a", (-1, True), make("useless", None))
    sessions.end("b")
    assert not made, "nothing is made before its turn"
    while line.pushes:
        line.make_push()
    assert made == ["first", "useless", "late"]
    assert [item[2] for item in line.outbox] == [b"first", b"late"]
    assert not sessions.push("b", (0, False), make("gone", b""))


def test_a_gateway_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "WAITING_BYTES", 1_000)
    sessions, (line,) = known("one")
    sessions.begin("a", line)
    assert sessions.say("a", ItemKind.SEND, bytes(900), num_bytes=900) and not line.is_over
    sessions.say("a", ItemKind.SEND, bytes(900), num_bytes=900)
    assert line.is_over and not sessions.say("a", ItemKind.SEND, b"")
