"""The life of a sampling engine across restarts: its width (rollouts sampled at the same time), its restarts, and its
rests. In a rest, a pause after failures, the node asks for no work.

Rules:
- An engine stopped on purpose restarts at once without counting as failed. The same holds for an engine that lacks
  weights, once the base model is fetched again.
- An engine that ran out of memory restarts at once with half the width. At width 1 it counts as dead. If it had worked
  for `STEADY_S` seconds, the cause is taken to be a leak, and the width stays.
- An engine that died restarts at once the first time. After further deaths without a finished rollout it waits, longer
  each time.
- After `MAX_FAILED_GROUPS` failed groups in a row the engine rests, longer after each further one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from echo_node.core.effects import StartEngine
from echo_node.core.events import EngineLost, EngineReady
from echo_node.core.troubles import Trouble, TroubleCode
from echo_shared.errors import DISK_FULL
from echo_shared.process.backoff import backoff_s

MAX_FAILED_GROUPS: Final = 3
"""If this many groups fail in a row, the node blames the engine instead of the groups. The node then rests: it asks for
no work for a while.
"""
USUAL_WIDTH: Final = 32
"""Assumed width (rollouts at the same time) of an engine that ran out of memory before it reported its width."""
STEADY_S: Final = 1_800.0
"""Seconds of work after which a lack of memory counts as a leak. The width then stays, because a restarted engine may
work as long again.
"""

Blame = Literal["nobody", "the start", "the work"]
"""Suspected cause of an engine's end. "the work": the leases that were running; "the start": the engine had not loaded
its model yet.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnding:
    """What follows when an engine has ended: the start of the next engine, and the blame for the end."""

    start: StartEngine
    blame: Blame


class EngineLife:
    """State of one engine across its restarts."""

    def __init__(self, device: str = "") -> None:
        self._device = device
        self.width = 0
        """Maximum number of rollouts sampled at the same time; 0 = no engine has loaded its model."""
        self.problem: Trouble | None = None
        """Problem of the engine, to report. None once an engine has started or finished a rollout."""
        self._ready_at = 0.0
        self._deaths = 0
        self._failed_groups = 0
        self._rests_until = 0.0

    @property
    def is_up(self) -> bool:
        """True while an engine runs that has loaded its model."""
        return self.width > 0

    def is_resting(self, now: float) -> bool:
        """Return True while the node must not ask for work, because the engine failed on too many groups in a row."""
        return now < self._rests_until

    def ready(self, event: EngineReady, now: float) -> None:
        self.width, self.problem = event.width, None
        self._ready_at = now

    def finished_rollout(self) -> None:
        """Reset the failure counts, because the engine works."""
        self._deaths = 0
        self._failed_groups = 0
        self.problem = None

    def group_failed(self, now: float, jitter: float, *, what: str, code: str) -> None:
        """Record a group that the engine could not sample. `jitter`: see `backoff_s`."""
        self.problem = _trouble(code, f"The engine failed on its work, which was returned to the hub: {what}")
        self._failed_groups += 1
        if self._failed_groups >= MAX_FAILED_GROUPS:
            wait_s = backoff_s(self._failed_groups - MAX_FAILED_GROUPS, jitter)
            self._rests_until = max(self._rests_until, now + wait_s)

    def lost(self, event: EngineLost, now: float, jitter: float) -> EngineEnding:
        """Record the end or the failed start of an engine. Return its restart, and the suspected cause."""
        was_up, self.width = self.is_up, 0
        was_steady = was_up and now - self._ready_at >= STEADY_S
        if event.cause in ("stopped", "no_weights"):
            self.problem = None
            return EngineEnding(start=StartEngine(after_s=0.0, device=self._device), blame="nobody")
        if event.cause == "out_of_memory" and (was_steady or event.width != 1):
            half = max(1, (event.width or USUAL_WIDTH) // 2)
            return EngineEnding(
                start=StartEngine(after_s=0.0, max_width=0 if was_steady else half, device=self._device), blame="nobody"
            )
        how = "has ended" if was_up else "does not start"
        self.problem = _trouble(event.code, f"The sampling engine {how} and restarts: {event.what}")
        after_s = 0.0 if self._deaths == 0 else backoff_s(self._deaths - 1, jitter)
        self._deaths += 1
        return EngineEnding(
            start=StartEngine(after_s=after_s, device=self._device), blame="the work" if was_up else "the start"
        )


def _trouble(code: str, sentence: str) -> Trouble:
    return Trouble(TroubleCode.DISK_FULL if code == DISK_FULL else TroubleCode.ENGINE, sentence)
