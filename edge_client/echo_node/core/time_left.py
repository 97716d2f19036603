"""Seconds until transfers and conversions are complete, from their progress in the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOW_S: Final = 20.0
"""Seconds over which the speed is averaged."""
LEAST_S: Final = 2.0
"""Minimum seconds of progress for an estimate."""


class TimeLeft:
    """Estimates of the seconds left, for any number of jobs. Call `note` regularly with the progress of all jobs."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        """Recent progress of each job, by the job's title: (time, bytes done) at each call of `note`."""

    def note(self, jobs: Mapping[str, tuple[int, int]], now: float) -> dict[str, float]:
        """Return the seconds left of each job that makes progress. `jobs`: (bytes done, total bytes) by title; `now`:
        monotonic time.
        """
        self._seen = {title: self._seen.get(title, deque()) for title in jobs}
        found = {}
        for title, (done, total) in jobs.items():
            seen = self._seen[title]
            if seen and done < seen[-1][1]:
                seen.clear()  # The job's number of bytes has fallen, so the job started again.
            seen.append((now, done))
            while now - seen[0][0] > WINDOW_S:
                seen.popleft()
            began, before = seen[0]
            if now - began >= LEAST_S and done > before:
                found[title] = max(0, total - done) * (now - began) / (done - before)
        return found
