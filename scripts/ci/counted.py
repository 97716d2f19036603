"""Run a program of Echo and record the large messages that it reads.

    python -m scripts.ci.counted FILE echo_hub|echo_node [ARGUMENT...]

FILE is JSON: the number of frames (encoded messages) above 16 KiB by message type, and the errors of refused frames.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from echo_shared.errors import EchoError
from echo_shared.wire import codec

REFUSED: Final = "refused: "


def count(file: Path) -> None:
    """Make the codec write counts of large frames to `file`. Call this before other modules import the codec's
    functions: otherwise they keep the functions that do not count.
    """
    counts: Counter[str] = Counter()

    def note(what: str) -> None:
        counts[what] += 1
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(counts))
        beside.replace(file)

    def counted(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def decode_and_note(frame: bytes) -> Any:
            try:
                message = decode(frame)
            except EchoError as error:
                note(REFUSED + error.brief)
                raise
            if len(frame) > codec.SMALL_BYTES:
                note(message.type)
            return message

        return decode_and_note

    for name in ("decode_from_hub", "decode_from_node"):
        setattr(codec, name, counted(getattr(codec, name)))


if __name__ == "__main__":
    count(Path(sys.argv[1]))
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
