from __future__ import annotations

import random

import pytest
from websockets.frames import Frame, Opcode

from echo_shared.wire import frame_gate
from echo_shared.wire.frame_gate import (
    CONTROLS_AT_ONCE,
    CONTROLS_PER_S,
    LEAST_BYTES,
    MESSAGES_AT_ONCE,
    MESSAGES_PER_S,
    MOST_FRAGMENTS,
    SMALL_BYTES,
    FrameGate,
)

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
MESSAGE = Frame(Opcode.BINARY, bytes(LEAST_BYTES))
CONTROLS = [
    *(Frame(opcode, bytes(size)) for opcode in (Opcode.PING, Opcode.PONG, Opcode.CLOSE) for size in (0, 125)),
    *(Frame(opcode, bytes(size)) for opcode in (Opcode.BINARY, Opcode.TEXT) for size in (0, LEAST_BYTES - 1)),
    *(Frame(Opcode.CONT, bytes(size), fin=False) for size in (0, 1, SMALL_BYTES - 1)),
    Frame(Opcode.CONT, b""),
]


def wire(frame: Frame, *, mask: bool = True) -> bytes:
    return frame.serialize(mask=mask)


def admitted(gate: FrameGate, data: bytes, *, now: float = 0.0, most: int = 50_000) -> int:
    """Offer the data frame by frame; return how many frames the gate admits."""
    return next((number for number in range(most) if not gate.admits(data, now=now)), most)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("frame", CONTROLS, ids=lambda frame: f"{frame.opcode.name}-{len(frame.data)}-{frame.fin}")
def test_control_frames_and_small_pieces_have_a_low_rate_limit(frame: Frame, mask: bool) -> None:
    gate, data = FrameGate(now=0.0), wire(frame, mask=mask)
    assert admitted(gate, data) == CONTROLS_AT_ONCE
    gate = FrameGate(now=0.0)
    assert all(gate.admits(data, now=number / CONTROLS_PER_S) for number in range(10_000))
    assert not FrameGate(now=0.0).admits(data * 501, now=0.0), "all in one read"


def test_small_messages_have_the_rate_of_a_node_that_works() -> None:
    assert admitted(FrameGate(now=0.0), wire(MESSAGE)) == MESSAGES_AT_ONCE
    last_piece = wire(Frame(Opcode.CONT, bytes(LEAST_BYTES)))
    assert admitted(FrameGate(now=0.0), last_piece) == MESSAGES_AT_ONCE, "a proxy may cut a message"
    gate = FrameGate(now=0.0)
    assert all(gate.admits(wire(MESSAGE), now=number / MESSAGES_PER_S) for number in range(50_000))


@pytest.mark.parametrize("size", [SMALL_BYTES, 65_535, 65_536])
def test_large_frames_are_their_readers_business(size: int) -> None:
    assert admitted(FrameGate(now=0.0), wire(Frame(Opcode.BINARY, bytes(size)))) == 50_000


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
def test_the_number_of_a_messages_fragments_is_limited(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(frame_gate, "CONTROLS_AT_ONCE", 1e9)
    part, end = wire(Frame(Opcode.CONT, bytes(size), fin=False)), wire(Frame(Opcode.CONT, bytes(SMALL_BYTES)))
    gate = FrameGate(now=0.0)
    for _ in range(2):
        assert all(gate.admits(part, now=0.0) for _ in range(MOST_FRAGMENTS)) and gate.admits(end, now=0.0)
    assert admitted(gate, part) == MOST_FRAGMENTS


@pytest.mark.parametrize("after_head", [True, False])
def test_frames_are_recognised_in_any_division_of_the_bytes(after_head: bool) -> None:
    """TCP may split the bytes anywhere, and a payload may look like a frame's head."""
    rng = random.Random(1)
    sizes = [0, 1, 125, 126, SMALL_BYTES - 1, SMALL_BYTES, 65_535, 65_536, 70_000]
    frames = [Frame(rng.choice([Opcode.PING, Opcode.BINARY]), b"") for _ in range(60)]
    frames = [
        Frame(frame.opcode, b"\x89\x00" * (size // 2) + b"\x89" * (size % 2))
        for frame in frames
        for size in [rng.choice([0, 1, 125] if frame.opcode is Opcode.PING else sizes)]
    ]
    data = b"".join(wire(frame, mask=rng.random() < 0.5) for frame in frames)
    controls = sum(frame.opcode is Opcode.PING or len(frame.data) < LEAST_BYTES for frame in frames)
    data = (HEAD if after_head else b"") + data
    for most in (1, 2, 3, 7, 1_000, len(data)):
        gate, at = FrameGate(now=0.0, after_head=after_head), 0
        while at < len(data):
            step = rng.randint(1, most)
            assert gate.admits(data[at : at + step], now=0.0)
            at += step
        assert admitted(gate, wire(Frame(Opcode.PING, b""))) == CONTROLS_AT_ONCE - controls


def test_a_head_without_end_is_no_frame() -> None:
    gate = FrameGate(now=0.0, after_head=True)
    assert all(gate.admits(b"\x89\x00" * 10_000, now=0.0) for _ in range(10))
