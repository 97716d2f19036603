"""A child process's sign of life: a thread tells its parent every beat that it runs, and whether it gets on.

Time without progress is counted in beats, not by a clock: a machine that slept has not stalled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from echo_shared.child import ParentPipe

ALIVE: Final = "alive"
"""The type of a frame that is a sign of life, and no answer."""


class Heartbeat:
    """Sends {"type": ALIVE, "stalled_s": ...}: how long the child's loop has had work and made no step."""

    def __init__(self, pipe: ParentPipe, beat_s: float) -> None:
        self.working = False
        """There is work, so steps are to be expected."""
        self._pipe = pipe
        self._beat_s = beat_s
        self._steps = 0
        self._seen = 0
        self._stalled_beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def step(self) -> None:
        """The child's loop has got on."""
        self._steps += 1

    @contextmanager
    def at_work(self, *, expects_steps: bool = True) -> Iterator[None]:
        """Until the block is left there is work, or, within it, a wait in which no step is to be expected."""
        before, self.working = self.working, expects_steps
        self.step()
        try:
            yield
        finally:
            self.working = before

    def beat(self) -> None:
        """Tells the parent once. Raises BrokenPipeError when it is gone."""
        steps = self._steps
        self._stalled_beats = self._stalled_beats + 1 if self.working and steps == self._seen else 0
        self._seen = steps
        self._pipe.send({"type": ALIVE, "stalled_s": self._stalled_beats * self._beat_s})

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self.beat()
            except BrokenPipeError:
                return  # The child's own thread sees it too.
