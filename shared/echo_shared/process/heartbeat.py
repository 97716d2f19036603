"""A child process's heartbeat: a thread regularly tells the parent that the child is alive and makes progress.

Time without progress is counted in heartbeats instead of clock time: a suspended machine sends none, so the child does
not look stalled afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from echo_shared.process.child import ParentPipe

ALIVE: Final = "alive"


class Heartbeat:
    """Sends {"type": ALIVE, "stalled_s": ...} every `beat_s` seconds. stalled_s: seconds without a call of `step`
    during work.
    """

    def __init__(self, pipe: ParentPipe, beat_s: float) -> None:
        self.working = False
        """True while the child has work, so that it must call `step`."""
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
        """Record that the child's loop has made progress."""
        self._steps += 1

    @contextmanager
    def at_work(self, *, expects_steps: bool = True) -> Iterator[None]:
        """Mark the block as work, during which the child must call `step`. `expects_steps=False`: the block is a wait
        inside such a block, and needs no steps.
        """
        before, self.working = self.working, expects_steps
        self.step()
        try:
            yield
        finally:
            self.working = before

    def beat(self) -> None:
        """Send one heartbeat. Raises BrokenPipeError if the parent is gone."""
        steps = self._steps
        self._stalled_beats = self._stalled_beats + 1 if self.working and steps == self._seen else 0
        self._seen = steps
        self._pipe.send({"type": ALIVE, "stalled_s": self._stalled_beats * self._beat_s})

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self.beat()
            except BrokenPipeError:
                return  # End without an error: the main thread detects the closed pipe as well.
