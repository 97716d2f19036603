"""Replaces the parts of the GPU benchmark in tests. A part's name selects how it behaves or fails, such as a crash."""

from __future__ import annotations

import os
import threading
from typing import Any

from benchmarks.gpu import running


def run(part: str, shape: str, seed: int, limit_s: float) -> dict[str, Any]:
    print("what a library prints")
    match part:
        case "raises":
            raise ValueError("no memory")
        case "dies":
            os._exit(9)
        case "hangs":
            threading.Event().wait()
    return {"shape": shape, "seed": seed, "limit_s": limit_s, "parent": os.getppid()}


if __name__ == "__main__":
    running.serve(run)
