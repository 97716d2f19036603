"""Frames of a payload. A frame is a length and a zstd frame of that length.

The reader knows each frame's content size, or its limit, in advance: it never allocates memory for a size that an
untrusted frame declares.
"""

from __future__ import annotations

import struct
from typing import IO, Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from echo_shared.errors import CodecError
from echo_shared.files.atomic import Readable

LEVEL: Final = 1
"""zstd compression level. Levels 3 and 9 are slower and do not make the frames of `delta.arrays` smaller."""
MAX_CONTENT_BYTES: Final = 2 << 20

_LENGTH: Final = struct.Struct("<I")
_WINDOW_BYTES: Final = 2 * MAX_CONTENT_BYTES


def damaged(got: str) -> CodecError:
    return CodecError("A policy version's payload is damaged, or was made against another parent.", got=got)


class FrameWriter:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def byte(self, value: int) -> None:
        self._stream.write(bytes([value]))

    def plain(self, content: bytes) -> None:
        """Write the length of `content`, then `content` itself, uncompressed."""
        self._stream.write(_LENGTH.pack(len(content)) + content)

    def frame(self, content: NDArray[np.uint8], *, dictionary: bytes = b"") -> None:
        """Write `content` [N], at most MAX_CONTENT_BYTES, compressed with an optional `dictionary`."""
        compressor = self._compressor
        if dictionary:
            options: dict[str, Any] = {"dict_data": _raw(dictionary), "write_checksum": True}
            compressor = zstandard.ZstdCompressor(level=LEVEL, **options)
        self.plain(compressor.compress(np.ascontiguousarray(content).data))


class FrameReader:
    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)

    def byte(self) -> int:
        return self._take(1)[0]

    def plain(self, limit: int) -> bytes:
        """Read a length and that many uncompressed bytes. Raises CodecError if the length exceeds `limit` bytes."""
        length: int = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        if length > limit:
            raise damaged(f"a part has {length} bytes, the limit is {limit}")
        return self._take(length)

    def frame(self, content_bytes: int, *, dictionary: bytes = b"") -> NDArray[np.uint8]:
        """Return the next frame's content, uint8 [content_bytes]. Raises CodecError if the content has another size."""
        frame = self.plain(content_bytes + content_bytes // 128 + 128)
        decompressor = self._decompressor
        if dictionary:
            decompressor = zstandard.ZstdDecompressor(dict_data=_raw(dictionary), max_window_size=_WINDOW_BYTES)
        try:
            # zstandard would allocate the size that the frame declares and ignore max_output_size.
            declared = zstandard.frame_content_size(frame)
            if declared != content_bytes:
                raise damaged(f"a part holds {declared} bytes instead of {content_bytes}")
            content = decompressor.decompress(frame, allow_extra_data=False) if content_bytes else b""
        except zstandard.ZstdError as error:
            raise damaged(str(error)) from error
        return np.frombuffer(content, np.uint8)

    def expect_end(self) -> None:
        if self._stream.read(1):
            raise damaged("bytes follow its end")

    def _take(self, count: int) -> bytes:
        taken = self._stream.read(count)
        if len(taken) < count:
            raise damaged("it ends too early")
        return taken


def _raw(content: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
