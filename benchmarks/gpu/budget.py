"""Time budget of one part, and its progress lines on standard error."""

from __future__ import annotations

import sys
import time


class Budget:
    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._began_at = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._began_at)

    def say(self, what: str) -> None:
        elapsed_s = time.monotonic() - self._began_at
        print(f"  {self._name}, {elapsed_s:.0f} of {self._limit_s:.0f} s: {what}", file=sys.stderr, flush=True)
