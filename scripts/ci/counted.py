"""Run a program of Echo, and write down which large messages it reads.

    python -m scripts.ci.counted FILE echo_hub|echo_node [ARGUMENT...]

FILE is JSON: how many frames of more than 16 KiB were read, by type of message, and what was said of those refused.
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

from echo_shared import codec
from echo_shared.errors import EchoError

REFUSED: Final = "refused: "


def count(file: Path) -> None:
    """Have the codec write each large frame into `file`. Call it before modules take its functions by name."""
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
