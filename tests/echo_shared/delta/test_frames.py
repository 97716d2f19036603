"""A compressed frame must hold data of the expected size. Otherwise the reader refuses it before allocating the memory
that the frame declares.
"""

from __future__ import annotations

import io
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from echo_shared.delta.frames import MAX_CONTENT_BYTES, FrameReader, FrameWriter
from echo_shared.errors import CodecError

CONTENT = np.arange(1000, dtype=np.uint32).view(np.uint8)
DICTIONARY = CONTENT[:3000].tobytes()


def written(*, dictionary: bytes = b"") -> bytes:
    stream = io.BytesIO()
    FrameWriter(stream).frame(CONTENT, dictionary=dictionary)
    return stream.getvalue()


def part(content: bytes) -> io.BytesIO:
    return io.BytesIO(struct.pack("<I", len(content)) + content)


def test_all_kinds_of_parts_decode_in_order() -> None:
    stream = io.BytesIO()
    writer = FrameWriter(stream)
    writer.byte(7)
    writer.plain(b"plain")
    writer.frame(CONTENT)
    writer.frame(CONTENT[::2])
    writer.frame(CONTENT, dictionary=DICTIONARY)
    reader = FrameReader(io.BytesIO(stream.getvalue()))
    assert reader.byte() == 7
    assert reader.plain(5) == b"plain"
    np.testing.assert_array_equal(reader.frame(4000), CONTENT)
    np.testing.assert_array_equal(reader.frame(2000), CONTENT[::2])
    np.testing.assert_array_equal(reader.frame(4000, dictionary=DICTIONARY), CONTENT)
    reader.expect_end()


def test_a_dictionary_more_than_halves_a_frame_of_its_content() -> None:
    assert len(written(dictionary=DICTIONARY)) < 0.5 * len(written())


@pytest.mark.parametrize("other", [b"", DICTIONARY[:-400], DICTIONARY[::-1]])
def test_another_dictionary_is_noticed(other: bytes) -> None:
    with pytest.raises(CodecError):
        FrameReader(io.BytesIO(written(dictionary=DICTIONARY))).frame(4000, dictionary=other)


@pytest.mark.parametrize("size", [0, 3999, 4001, MAX_CONTENT_BYTES])
def test_a_frame_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(CodecError):
        FrameReader(io.BytesIO(written())).frame(size)


def test_the_largest_frame_decodes_if_compressible_or_not() -> None:
    for content in (
        np.zeros(MAX_CONTENT_BYTES, np.uint8),
        np.frombuffer(np.random.default_rng(1).bytes(2 << 20), "u1"),
    ):
        stream = io.BytesIO()
        FrameWriter(stream).frame(content, dictionary=content.tobytes()[::-1])
        reader = FrameReader(io.BytesIO(stream.getvalue()))
        assert np.array_equal(reader.frame(content.size, dictionary=content.tobytes()[::-1]), content)


def hostile_frames() -> dict[str, bytes]:
    bomb = zstandard.ZstdCompressor().compress(bytes(100 << 20))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    plain = zstandard.ZstdCompressor().compress(bytes(16))
    # Declares a window of 2 GiB (RFC 8878, section 3.1.1.1.2). The frame is cut off: a complete frame would be decoded
    # in one step, without a window.
    window = bytes.fromhex("28b52ffd 80 a8 10000000 830000")
    return {
        "a bomb": bomb,
        "of unknown size": streamed.compress(bytes(16)) + streamed.flush(),
        "two": plain + plain,
        "cut": plain[:-1],
        "a window too large, cut": window,
        "of more than it declares": bytes.fromhex("28b52ffd 20 10 8b000000"),
        "empty": b"",
        "something else": b"something else",
    }


@pytest.mark.parametrize("kind", hostile_frames())
def test_a_hostile_frame_is_refused_and_allocates_nothing(kind: str) -> None:
    stream = part(hostile_frames()[kind])
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            FrameReader(stream).frame(16)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_missing_or_extra_bytes_are_refused() -> None:
    for stream in (io.BytesIO(b""), io.BytesIO(b"\1\0"), io.BytesIO(struct.pack("<I", 5) + b"four")):
        with pytest.raises(CodecError, match="payload"):
            FrameReader(stream).plain(100)
    with pytest.raises(CodecError, match="payload"):
        FrameReader(part(bytes(101))).plain(100)
    with pytest.raises(CodecError):
        FrameReader(io.BytesIO()).byte()
    with pytest.raises(CodecError):
        FrameReader(io.BytesIO(b"x")).expect_end()
