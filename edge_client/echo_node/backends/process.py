"""The node's side of its engine, which samples in a child process, the worker. This module imports no engine.

A worker reports every few seconds that it is alive and makes progress. A worker that is silent, stalls or exceeds its
memory limit is killed. Each end of a worker is a BackendError with the reason.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings, GroupFailed
from echo_node.backends.caging import CAGED_ENVIRONMENT, CageTerms
from echo_node.backends.frames import (
    error_from_frame,
    group_to_frame,
    parts_from_frame,
    rollouts_from_frame,
    score_to_frame,
)
from echo_node.backends.registry import BackendChoice
from echo_node.host.priority import Priority
from echo_shared.cage.description import Held
from echo_shared.errors import BackendError
from echo_shared.process.child import ChildExited, Death, Frame
from echo_shared.process.supervised import ChildLimits, Command, SupervisedChild
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Scored, ScoreRequest

WORKER: Final = "echo_node.backends.worker"

STOP_TIMEOUT_S: Final = 3.0
"""Seconds to wait before a stopping worker is killed. A kill loses no data: the node has everything that it needs."""

HUGE_PAGES: Final = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Setting of PyTorch: put large tensors on huge pages where Linux offers them. Freeing a model of 2.4 GB, when the
owner's game needs the memory, then takes 0.1 s instead of 0.4 s.
"""

DIED: Final = "worker_died"
SILENT: Final = "worker_silent"
STALLED: Final = "worker_stalled"
STOPPED: Final = "worker_stopped"
"""Codes of the BackendErrors that end a worker, in addition to OUT_OF_MEMORY and the codes of engines."""

_CODES: Final = {
    Death.OUT_OF_MEMORY: OUT_OF_MEMORY,
    Death.SILENT: SILENT,
    Death.LATE: STALLED,
    Death.STALLED: STALLED,
    Death.STOPPED: STOPPED,
}
_RATE_WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Rollouts that the engine finished in one step."""

    rollouts: tuple[FinishedRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """Tokens of unfinished rollouts, drawn since the last report."""

    parts: tuple[DrawnPart, ...]
    for_hub: bool
    """True if the node should send these tokens, and those of earlier reports, to the hub now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The worker has dropped the lease, after it reported all tokens drawn for the lease."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The worker can switch to this version without a wait. Reported while another version samples."""

    policy_version: int


WorkerNews = Finished | GroupFailed | DrawnTokens | Cancelled | Prepared | Scored


class EngineChild:
    """A running worker. After a BackendError from `events` it is unusable: start another one."""

    def __init__(self, child: SupervisedChild, limits: ChildLimits) -> None:
        self.width = 0
        """Maximum number of rollouts sampled at the same time."""
        self.precision = ""
        self.scores = False
        """True if the engine can recompute completions (`score`)."""
        self.converted: Path | None = None
        """File with converted weights that the engine reads; None: it reads the base model's own files."""
        self.kept = KeptKeys()
        """The engine's kept keys and values, as of its last finished rollout."""
        self.held = Held(by=())
        """Protections of the engine's cage (sandbox) that are in force."""
        self._child = child
        self._limits = limits
        self._recent: deque[tuple[int, float]] = deque()
        self._recent_tokens, self._recent_s = 0, 0.0
        """Sums of the tokens and of the seconds in `_recent`, for `tokens_per_s`."""
        self._told: dict[int, dict[int, int]] = {}
        """Number of tokens of each unfinished rollout that are already counted in the speed measurement (`_recent`), by
        lease and index.
        """

    @classmethod
    async def start(
        cls,
        choice: BackendChoice,
        *,
        base_dir: Path,
        derived_dir: Path,
        log: Path,
        settings: EngineSettings,
        limits: ChildLimits,
        cage: CageTerms,
        priority: Priority = "normal",
    ) -> EngineChild:
        """Start a worker and wait until its model is loaded. `choice` sets the device.

        Raises BackendError if the engine cannot run the model, or if its process ends.
        """
        opening = {
            "backend": choice.name,
            "base_dir": str(base_dir),
            "derived_dir": str(derived_dir),
            "settings": {**asdict(settings), "device": choice.device},
            "beat_s": limits.beat_s,
            "priority": priority,
            "cage": cage.to_frame(),
        }
        environment = {**HUGE_PAGES, **({} if cage.mode == "off" else CAGED_ENVIRONMENT), **choice.environment}
        try:
            child = await SupervisedChild.start(
                Command(module=WORKER, name="engine's", log=log, env=environment), opening, limits
            )
        except ChildExited as error:
            raise _why(error) from error
        if child.ready["type"] == "ended":
            await child.stop(timeout_s=STOP_TIMEOUT_S)
            raise error_from_frame(child.ready)
        engine = cls(child, limits)
        engine.width, engine.precision = child.ready["width"], child.ready["precision"]
        engine.scores = child.ready["scores"]
        engine.converted = None if child.ready["converted"] is None else Path(child.ready["converted"])
        engine.held = Held.of(child.ready["cage"])
        return engine

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of sampling, over the last busy seconds; 0 before the first token."""
        return self._recent_tokens / self._recent_s if self._recent_tokens else 0.0

    async def limit_duty(self, share: float) -> None:
        """Use at most this share of the device's time (`duty_cycle`), from the next step on. Raises ChildExited."""
        await self._child.send({"type": "duty", "share": share})

    async def add_policy(self, version: int, adapter_dir: Path | None) -> None:
        """Make `version` known. `adapter_dir` None: the base model without adapter, which is version 0 from the start.

        The worker prepares the adapter at once, while another version samples. Raises ChildExited, like all commands.
        """
        await self._child.send(
            {"type": "add_policy", "version": version, "dir": None if adapter_dir is None else str(adapter_dir)}
        )

    async def drop_policy(self, version: int) -> None:
        """Make the worker forget `version`. No group with this version may be queued or running."""
        await self._child.send({"type": "drop_policy", "version": version})

    async def submit(self, request: GroupRequest) -> None:
        """Queue a group. `events` then yields each of its rollouts, or one GroupFailed for those that the engine cannot
        sample.
        """
        await self._child.send({"type": "submit", "group": group_to_frame(request)})

    async def cancel(self, lease_id: int) -> None:
        """Drop a lease's unfinished rollouts. Reports already on the way still arrive, then `Cancelled`."""
        await self._child.send({"type": "cancel", "lease_id": lease_id})

    async def score(self, request: ScoreRequest) -> None:
        """Ask the worker to recompute a completion when its engine has time. `events` then yields one `Scored`."""
        await self._child.send({"type": "score", "completion": score_to_frame(request)})

    async def measure(self, *, widths: Sequence[int], budget_s: float) -> list[dict[str, Any]]:
        """Measure the engine's speed, see `measure.measure`. Call this before the first group. Raises BackendError."""
        try:
            await self._child.send({"type": "measure", "widths": list(widths), "budget_s": budget_s})
        except ChildExited as error:
            raise _why(error) from error
        frame = await self._receive(within_s=budget_s + self._limits.stalled_s)
        rows: list[dict[str, Any]] = frame["rows"]
        return rows

    async def events(self) -> AsyncIterator[WorkerNews]:
        """Yield the worker's reports until the worker ends, which raises BackendError. Cancel-safe, for one reader at a
        time.
        """
        while True:
            frame = await self._receive()
            match frame["type"]:
                case "finished":
                    rollouts = tuple(rollouts_from_frame(frame))
                    self._count(sum(map(self._untold, rollouts)), frame["busy_s"])
                    self.kept = KeptKeys(**frame["kept"])
                    yield Finished(rollouts=rollouts)
                case "drawn":
                    parts = tuple(parts_from_frame(frame))
                    for part in parts:
                        of_lease = self._told.setdefault(part.lease_id, {})
                        of_lease[part.index] = of_lease.get(part.index, 0) + len(part.ids)
                    self._count(sum(len(part.ids) for part in parts), frame["busy_s"])
                    yield DrawnTokens(parts=parts, for_hub=frame["for_hub"])
                case "cancelled":
                    self._told.pop(frame["lease_id"], None)
                    yield Cancelled(lease_id=frame["lease_id"])
                case "scored":
                    yield Scored(**{name: value for name, value in frame.items() if name != "type"})
                case "prepared":
                    yield Prepared(policy_version=frame["version"])
                case _:
                    self._told.pop(frame["lease_id"], None)
                    yield GroupFailed(lease_id=frame["lease_id"], code=frame["code"], what=frame["what"])

    async def _receive(self, *, within_s: float = math.inf) -> Frame:
        """Return the worker's next frame. Raises BackendError when the worker has ended. Cancel-safe."""
        try:
            frame = await self._child.receive(within_s=within_s)
        except ChildExited as error:
            raise _why(error) from error
        if frame["type"] == "ended":
            raise error_from_frame(frame)
        return frame

    def _untold(self, rollout: FinishedRollout) -> int:
        """Return the number of tokens that this node drew for the rollout and that are not yet counted in the speed
        measurement.
        """
        of_lease = self._told.get(rollout.lease_id, {})
        told = of_lease.pop(rollout.index, 0)
        if not of_lease:
            self._told.pop(rollout.lease_id, None)
        return len(rollout.completion_ids) - rollout.num_given - told

    def _count(self, tokens: int, busy_s: float) -> None:
        self._recent.append((tokens, busy_s))
        self._recent_tokens += tokens
        self._recent_s += busy_s
        while len(self._recent) > 1 and self._recent_s > _RATE_WINDOW_S:
            gone_tokens, gone_s = self._recent.popleft()
            self._recent_tokens -= gone_tokens
            self._recent_s -= gone_s

    def suspend(self) -> None:
        """Pause all threads of the worker. The worker reads commands sent during the pause after `resume`."""
        self._child.suspend()

    def resume(self) -> None:
        self._child.resume()

    async def end(self) -> None:
        """Kill the worker. `events` then raises BackendError with the code STOPPED."""
        await self._child.stop(timeout_s=0.0)

    async def stop(self) -> None:
        """Ask the worker to stop, and kill it if it still runs after STOP_TIMEOUT_S. Allowed after its end. `events`
        then raises with the code STOPPED.
        """
        await self._child.stop(timeout_s=STOP_TIMEOUT_S)


def _why(error: ChildExited) -> BackendError:
    return BackendError(error.what, got=error.got, do=error.do, code=_CODES.get(error.death, DIED))
