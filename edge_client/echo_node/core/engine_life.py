"""The life of the sampling engine: how wide it is, how it is started again after its end, and when it is to rest.

Rules:
- an engine that was stopped on purpose starts again at once, at nobody's cost; so does one without weights, once the
  base model is here again;
- one that ran out of memory starts again at once with half its width, until its width is 1: then it died. One that had
  worked for `STEADY_S` leaks, and keeps its width;
- one that died starts again at once the first time; in a row of deaths without a finished rollout it waits, longer
  each time;
- after `MAX_FAILED_GROUPS` failed groups in a row it rests, longer with each further one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from echo_node.core.effects import StartEngine
from echo_node.core.events import EngineLost, EngineReady
from echo_node.core.troubles import Trouble, TroubleCode
from echo_shared.backoff import backoff_s
from echo_shared.errors import DISK_FULL

MAX_FAILED_GROUPS: Final = 3
"""So many in a row are not the groups' fault: the node then rests before it asks for more, longer each time."""
USUAL_WIDTH: Final = 32
"""Stands for the width of an engine that ran out of memory before it could tell."""
STEADY_S: Final = 1_800.0
"""An engine that runs out of memory after it worked this long leaks: another of the same width may work as long."""

Blame = Literal["nobody", "the start", "the work"]
"""What an engine's end is put down to: the work is what was running then; the start has nothing to do with any work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnding:
    """What follows from an engine's end."""

    start: StartEngine
    blame: Blame


class EngineLife:
    """One engine after another, told of by what they report."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` in [0, 1) spreads waits, as in `backoff_s`."""
        self.width = 0
        """Rollouts sampled at once; 0 = no engine is up."""
        self.problem: Trouble | None = None
        """Why it is not up, or why what it was given failed; until it is up, or has finished something."""
        self._jitter = jitter
        self._ready_at = 0.0
        self._deaths = 0
        """Since the last finished rollout."""
        self._failed_groups = 0
        """Since the last finished rollout."""
        self._rests_until = 0.0

    @property
    def is_up(self) -> bool:
        """Whether an engine has its model loaded."""
        return self.width > 0

    def is_resting(self, now: float) -> bool:
        """Whether so many groups failed that no more are to be asked for at this moment."""
        return now < self._rests_until

    def ready(self, event: EngineReady, now: float) -> None:
        """An engine is up."""
        self.width, self.problem = event.width, None
        self._ready_at = now

    def finished_rollout(self) -> None:
        """What failed before is over: the engine works."""
        self._deaths = 0
        self._failed_groups = 0
        self.problem = None

    def group_failed(self, now: float, *, what: str, code: str) -> None:
        """The engine could not sample one group, and goes on."""
        self.problem = _trouble(code, f"What the engine was given failed, and went back to the hub: {what}")
        self._failed_groups += 1
        if self._failed_groups >= MAX_FAILED_GROUPS:
            wait_s = backoff_s(self._failed_groups - MAX_FAILED_GROUPS, self._jitter())
            self._rests_until = max(self._rests_until, now + wait_s)

    def lost(self, event: EngineLost, now: float) -> EngineEnding:
        """The engine is gone, or did not start."""
        was_up, self.width = self.is_up, 0
        was_steady = was_up and now - self._ready_at >= STEADY_S
        if event.cause in ("stopped", "no_weights"):
            self.problem = None
            return EngineEnding(start=StartEngine(after_s=0.0), blame="nobody")
        if event.cause == "out_of_memory" and (was_steady or event.width != 1):
            half = max(1, (event.width or USUAL_WIDTH) // 2)
            return EngineEnding(start=StartEngine(after_s=0.0, max_width=0 if was_steady else half), blame="nobody")
        how = "has ended" if was_up else "does not start"
        self.problem = _trouble(event.code, f"The sampling engine {how}, and is started again: {event.what}")
        after_s = 0.0 if self._deaths == 0 else backoff_s(self._deaths - 1, self._jitter())
        self._deaths += 1
        return EngineEnding(start=StartEngine(after_s=after_s), blame="the work" if was_up else "the start")


def _trouble(code: str, sentence: str) -> Trouble:
    return Trouble(TroubleCode.DISK_FULL if code == DISK_FULL else TroubleCode.ENGINE, sentence)
