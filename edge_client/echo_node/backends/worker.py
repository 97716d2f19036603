"""The engine's child process: `python -m echo_node.backends.worker`. `process.EngineChild` controls it over its
streams.

An engine may crash, leak or be killed for its memory; in a child process it takes nothing else down.
- Groups queue here. Groups of the current policy version go into the running batch. When none is left, the batch
  drains, and the engine switches to the next prepared version in the queue.
- The worker reports a prepared version while another one samples. The parent may then cancel running leases and submit
  them again with the new version, with their drawn tokens as prefix.
- The worker reports tokens of unfinished rollouts every few seconds for the hub, and before it confirms a cancel. An
  engine with slow steps reports after each step, because the node may stop it during the next one.
- The engine rests between two steps if the node limits its share of the device's time (`duty_cycle`). During a rest
  the worker reads the node's commands.
- Completions of other nodes are scored while no sampling runs, or between two batches after a waiting time.

The process ends when its parent closes the pipe or dies. If the engine becomes unusable, a last frame gives the reason.
The process enters its cage (`caging`) before it starts threads or touches data from a hub.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final, assert_never

from echo_node.backends import measure, registry
from echo_node.backends.base import OUT_OF_MEMORY, Engine, EngineEvent, EngineSettings, GroupFailed
from echo_node.backends.caging import Caged, CageTerms, cage_engine
from echo_node.backends.duty_cycle import DutyCycle
from echo_node.backends.frames import (
    error_to_frame,
    group_from_frame,
    parts_to_frame,
    rollouts_to_frame,
    score_from_frame,
)
from echo_node.backends.policies import EnginePolicies
from echo_node.host.hardware import sensible_threads
from echo_node.host.priority import die_with_parent, give_way
from echo_shared.errors import POLICY_UNUSABLE, BackendError, CodecError, EchoError
from echo_shared.process import process_memory
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.process.heartbeat import Heartbeat
from echo_shared.process.importing import do_without, uncollected
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.scoring import Scored, ScoreRequest

_LISTEN_S: Final = 0.05
"""Seconds between two checks for the node's commands while the worker waits for the preparation of an adapter."""

REST_S: Final = 1.0
"""Seconds between two signs of progress during a rest, so that the node does not take the resting worker for stalled.
"""

SLOW_STEP_S: Final = 0.03
"""Duration of an engine's step, in seconds, from which the worker reports tokens after each step. A faster engine
reports when it is asked to cancel: even a step that the owner's program slows down several times ends before the node
stops the engine's threads (`core.yielding.YIELD_S`).
"""

SCORES_WAIT_S: Final = 5.0
"""Seconds for which a completion waits to be scored. After them, no new group joins the running batch, and the
completion is scored once the batch is empty.
"""
SHORT_OF_MEMORY_BYTES: Final = 256 * 2**20
"""Free memory of the machine below which the engine drops its kept keys and values."""
MEMORY_EVERY_S: Final = 1.0
USELESS: Final = {"torch": ("scipy",)}
"""Modules, by backend, that the worker keeps from being imported: the backend's library imports them although no engine
needs them. Transformers imports SciPy for object detection.
"""

_logger = logging.getLogger(__name__)


class EngineWorker:
    """The worker's loop: reads the node's commands, and writes rollouts. As an iterator, it gives the engine the queued
    groups; it may yield groups again after it had none.
    """

    def __init__(
        self,
        pipe: ParentPipe,
        engine: Engine,
        heartbeat: Heartbeat,
        base_dir: Path,
        *,
        duty: DutyCycle,
        stream_s: float,
    ) -> None:
        self._pipe = pipe
        self._engine = engine
        self._duty = duty
        self._heartbeat = heartbeat
        self._base_dir = base_dir
        self._policies = EnginePolicies(engine)
        self._queues: dict[int, deque[GroupRequest]] = {}
        """Waiting groups by version. The versions are in order of arrival; no queue is empty."""
        self._current: int | None = None
        self._unfinished: Counter[int] = Counter()
        """Number of rollouts inside the engine, by lease."""
        self._to_score: deque[tuple[float, ScoreRequest]] = deque()
        """Queue of completions to score, each with its time of arrival."""
        self._stream_s = stream_s
        self._memory_due_at = 0.0
        """Time of the next check of the machine's free memory."""
        self._told_at = self._stepped_at = self._busy_from = time.perf_counter()

    def run(self) -> None:
        """Work until the parent closes the pipe. Raises BackendError if the engine becomes unusable."""
        while not self._pipe.ended:
            ready = [version for version in self._queues if self._policies.is_ready(version)]
            self._heartbeat.working = bool(self._queues or self._to_score)
            if self._to_score and (not ready or self._scores_are_due):
                self._score(self._to_score.popleft()[1])
                self._handle_waiting()
            elif ready:
                self._sample(ready[0])
            elif self._queues:
                self._policies.wait(self._queues, _LISTEN_S)
                self._handle_waiting()
            else:
                self._handle(self._pipe.receive())
        self._policies.close()

    def _handle(self, frame: Frame | None) -> None:
        match frame:
            case {"type": "submit", "group": group}:
                request = group_from_frame(group)
                self._queues.setdefault(request.policy_version, deque()).append(request)
            case {"type": "score", "completion": completion}:
                self._to_score.append((time.perf_counter(), score_from_frame(completion)))
            case {"type": "cancel", "lease_id": lease_id}:
                self._cancel(lease_id)
            case {"type": "add_policy", "version": version, "dir": adapter_dir}:
                self._forget(version)
                self._policies.add(version, None if adapter_dir is None else Path(adapter_dir))
            case {"type": "drop_policy", "version": version}:
                self._forget(version)
            case {"type": "duty", "share": share}:
                self._duty.limit(share)
            case {"type": "measure", "widths": widths, "budget_s": budget_s}:
                self._measure(tuple(widths), budget_s)
            case None:
                pass  # The parent has closed the pipe; `run` notices it and ends.
            case _:
                raise BackendError("The worker got an unknown command.", got=str(frame.get("type")))

    def _forget(self, version: int) -> None:
        """Forget a version, with the keys and values kept for it. Another policy may later get the same number."""
        self._policies.drop(version)
        self._engine.forget(version)
        if version == self._current:
            self._current = None

    def _handle_waiting(self) -> None:
        while (frame := self._pipe.poll()) is not None:
            self._handle(frame)

    def _cancel(self, lease_id: int) -> None:
        for version, queue in list(self._queues.items()):
            self._queues[version] = deque(group for group in queue if group.lease_id != lease_id)
            if not self._queues[version]:
                del self._queues[version]
        if self._unfinished.pop(lease_id, 0):
            self._tell_news(for_hub=True)
            self._engine.cancel(lease_id)
        self._pipe.send({"type": "cancelled", "lease_id": lease_id})

    def _stepped(self) -> None:
        """Report the tokens of unfinished rollouts, if a report is due."""
        began, self._stepped_at = self._stepped_at, time.perf_counter()
        for_hub = self._stepped_at - self._told_at >= self._stream_s
        if for_hub or self._stepped_at - began >= SLOW_STEP_S:
            self._tell_news(for_hub=for_hub)

    def _tell_news(self, *, for_hub: bool) -> None:
        """Report the tokens of unfinished rollouts drawn since the last report. `for_hub`: the node must send these and
        earlier reported tokens to the hub.
        """
        if not self._stream_s:
            return
        if for_hub:
            self._told_at = time.perf_counter()
        if parts := self._engine.news():
            told = {"for_hub": for_hub, "busy_s": self._take_busy_s(), **parts_to_frame(parts)}
            self._pipe.send({"type": "drawn", **told})

    @property
    def _scores_are_due(self) -> bool:
        return bool(self._to_score) and time.perf_counter() - self._to_score[0][0] >= SCORES_WAIT_S

    def _score(self, request: ScoreRequest) -> None:
        """Recompute a completion, and report the result or the failure. Errors do not stop the sampling."""
        found = []
        self._duty.begin()
        try:
            for version, ids, first in request.spans():
                self._policies.use(version)
                found.append(self._engine.score(ids, first, request.temperature))
        except EchoError as error:
            _logger.warning("A completion cannot be scored: %s", error)
            found = []
        self._heartbeat.step()
        self._pipe.send({"type": "scored", **asdict(Scored.of(request.rollout_id, found))})
        self._rest()

    def _rest(self) -> None:
        """End a step. Rest until the next step may begin, and handle the node's commands meanwhile."""
        self._duty.end()
        while (left_s := self._duty.rest_s) and not self._pipe.ended:
            self._handle(self._pipe.receive(timeout_s=min(left_s, REST_S)))
            self._heartbeat.step()
        self._stepped_at = time.perf_counter()
        self._duty.begin()

    def _take_busy_s(self) -> float:
        """Return the seconds since the last call, including the engine's rests."""
        began, self._busy_from = self._busy_from, time.perf_counter()
        return self._busy_from - began

    def _measure(self, widths: tuple[int, ...], budget_s: float) -> None:
        """Measure the engine with the base model without adapter. Nothing may be queued or running."""
        self._policies.use_base()
        rows = measure.measure(self._engine, self._base_dir, widths=widths, budget_s=budget_s)
        self._duty.forgive()
        self._pipe.send({"type": "measured", "rows": rows})

    def __iter__(self) -> Iterator[GroupRequest]:
        return self

    def __next__(self) -> GroupRequest:
        """Return the next group of the current version. This method reads no commands, because some commands change the
        running batch.
        """
        queue = self._queues.get(self._current) if self._current is not None else None
        if queue is None or self._scores_are_due:
            raise StopIteration
        request = queue.popleft()
        if not queue:
            del self._queues[request.policy_version]
        self._unfinished[request.lease_id] += len(request.indices)
        return request

    def _sample(self, version: int) -> None:
        """Sample until no group of `version` is queued or running."""
        try:
            self._policies.use(version)
        except EchoError as error:
            _raise_if_fatal(error)
            _logger.warning("Policy version %d cannot be used: %s", version, error)
            failed = self._queues.pop(version)
            code = POLICY_UNUSABLE if isinstance(error, CodecError) else error.code
            self._send_failed([group.lease_id for group in failed], error, code=code)
            return
        self._current = version
        self._busy_from = self._stepped_at = time.perf_counter()
        self._duty.begin()
        try:
            for events in self._engine.sample(self):
                self._heartbeat.step()
                if events:
                    self._report(events)
                self._stepped()
                for prepared in self._policies.take_prepared() if self._stream_s else ():
                    self._pipe.send({"type": "prepared", "version": prepared})
                self._handle_waiting()
                self._rest()
                if self._pipe.ended:
                    return
        except BackendError as error:
            _raise_if_fatal(error)
            _logger.exception("The engine failed.")
            self._send_failed(list(self._unfinished), error, code=error.code)
            self._unfinished.clear()

    def _report(self, events: list[EngineEvent]) -> None:
        finished: list[FinishedRollout] = []
        failed: list[GroupFailed] = []
        for event in events:
            match event:
                case FinishedRollout():
                    finished.append(event)
                case GroupFailed():
                    failed.append(event)
                case _:
                    assert_never(event)
        for rollout in finished:
            self._unfinished[rollout.lease_id] -= 1
            if self._unfinished[rollout.lease_id] == 0:
                del self._unfinished[rollout.lease_id]
        if finished:
            self._free_memory()
            told = {"busy_s": self._take_busy_s(), "kept": asdict(self._engine.kept)}
            self._pipe.send({"type": "finished", **told, **rollouts_to_frame(finished)})
        for group in failed:
            self._unfinished.pop(group.lease_id, 0)
            self._pipe.send({"type": "failed", "lease_id": group.lease_id, "code": group.code, "what": group.what})

    def _free_memory(self) -> None:
        """Drop the kept keys and values if the machine runs short of memory."""
        now = time.perf_counter()
        if now < self._memory_due_at:
            return
        self._memory_due_at = now + MEMORY_EVERY_S
        if process_memory.left_bytes() < SHORT_OF_MEMORY_BYTES:
            self._engine.forget()

    def _send_failed(self, lease_ids: list[int], error: EchoError, *, code: str) -> None:
        for lease_id in lease_ids:
            self._pipe.send({"type": "failed", "lease_id": lease_id, "code": code, "what": error.brief})


def _raise_if_fatal(error: EchoError) -> None:
    if error.code == OUT_OF_MEMORY:
        raise error


def serve(pipe: ParentPipe) -> None:
    """Open the engine that the first frame names, report that it is ready, and work until the end."""
    frame = pipe.opening()
    if frame is None:
        return
    cores = sensible_threads()  # Count the cores now: in its cage, this process cannot read every limit on them.
    # Set the priority, and enter the cage, before any thread starts: a thread inherits both from the thread that starts
    # it.
    give_way(frame["priority"])
    caged = _enter_cage(frame)
    pipe.begin()
    base_dir, settings = Path(frame["base_dir"]), caged.settings
    with Heartbeat(pipe, frame["beat_s"]) as heartbeat:
        do_without(*USELESS.get(frame["backend"], ()))
        with uncollected():
            engine = registry.make_engine(frame["backend"])
        width = engine.open(base_dir, Path(frame["derived_dir"]), settings)
        ready = {"type": "ready", "width": width, "precision": engine.precision, "scores": engine.scores}
        converted = None if engine.converted is None else str(engine.converted)
        pipe.send({**ready, "converted": converted, "cage": caged.held.as_json()})
        duty = DutyCycle(cores if settings.device == "cpu" else 0)
        EngineWorker(pipe, engine, heartbeat, base_dir, duty=duty, stream_s=settings.stream_s).run()
        engine.close()


def _enter_cage(frame: Frame) -> Caged:
    try:
        return cage_engine(
            frame["backend"],
            Path(frame["base_dir"]),
            Path(frame["derived_dir"]),
            EngineSettings(**frame["settings"]),
            CageTerms.from_frame(frame["cage"]),
        )
    except OSError as error:
        raise BackendError(
            "The engine has no directory for its conversions.",
            got=str(error),
            do=f"Make {frame['derived_dir']} writable, and check that its disk has room.",
        ) from error


def main() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    process_memory.go_first()
    die_with_parent()
    pipe = ParentPipe(begun=False)
    try:
        serve(pipe)
    except EchoError as error:
        _logger.exception("The engine has become unusable.")
        pipe.send(error_to_frame(error))
    except MemoryError as error:
        _logger.exception("The engine is out of memory.")
        pipe.send(error_to_frame(BackendError("The engine ran out of memory.", got=str(error), code=OUT_OF_MEMORY)))


if __name__ == "__main__":
    main()
