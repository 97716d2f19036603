"""The backend's child process: `python -m echo_node.backends.worker`, driven by `process.Backend` over its streams.

An engine may crash, leak or be killed for its memory; as a child it takes nobody with it. Groups queue here. Those of
the current policy version flow into the running batch; when the queue has none left, the batch drains and the engine
takes the adapter of the next version in the queue. The process ends when its parent closes the pipe or dies.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

from echo_node.backends import registry
from echo_node.backends.base import Engine, EngineEvent, EngineSettings, GroupFailed
from echo_node.backends.frames import group_from_frame, rollouts_to_frame
from echo_shared.child import Frame, ParentPipe
from echo_shared.errors import BackendError, EchoError
from echo_shared.sampling import FinishedRollout, GroupRequest

_logger = logging.getLogger(__name__)


class Worker:
    """Commands in, rollouts out. Its own iterator of groups: it runs dry, and yields again when more were submitted."""

    def __init__(self, pipe: ParentPipe) -> None:
        self._pipe = pipe
        self._engine: Engine | None = None
        self._policies: dict[int, Path | None] = {0: None}
        self._queues: dict[int, deque[GroupRequest]] = {}
        """Groups by version; versions in order of arrival, none empty."""
        self._current: int | None = None
        self._unfinished: Counter[int] = Counter()
        """Rollouts that the engine holds, by lease."""

    def run(self) -> None:
        frame = self._pipe.receive()
        if frame is None or not self._open(frame):
            return
        assert self._engine is not None
        while not self._pipe.ended:
            if self._queues:
                self._sample(self._engine, next(iter(self._queues)))
            else:
                self._handle(self._pipe.receive())
        self._engine.close()

    def _open(self, frame: Frame) -> bool:
        try:
            self._engine = registry.make_engine(frame["backend"])
            settings = EngineSettings(**frame["settings"])
            width = self._engine.open(Path(frame["base_dir"]), Path(frame["derived_dir"]), settings)
        except EchoError as error:
            self._pipe.send(
                {"type": "refused", "code": error.code, "what": error.what, "got": error.got, "do": error.do}
            )
            return False
        self._pipe.send({"type": "ready", "width": width})
        return True

    def _handle(self, frame: Frame | None) -> None:
        match frame:
            case {"type": "submit", "group": group}:
                request = group_from_frame(group)
                self._queues.setdefault(request.policy_version, deque()).append(request)
            case {"type": "cancel", "lease_id": lease_id}:
                self._cancel(lease_id)
            case {"type": "add_policy", "version": version, "dir": adapter_dir}:
                self._policies[version] = None if adapter_dir is None else Path(adapter_dir)
            case {"type": "drop_policy", "version": version}:
                self._policies.pop(version, None)
            case None:
                pass  # The pipe has ended, which `run` sees.
            case _:
                raise BackendError("The worker got a command that it does not know.", got=str(frame.get("type")))

    def _handle_waiting(self) -> None:
        while (frame := self._pipe.poll()) is not None:
            self._handle(frame)

    def _cancel(self, lease_id: int) -> None:
        for version, queue in list(self._queues.items()):
            self._queues[version] = deque(group for group in queue if group.lease_id != lease_id)
            if not self._queues[version]:
                del self._queues[version]
        if self._unfinished.pop(lease_id, 0):
            assert self._engine is not None
            self._engine.cancel(lease_id)

    def __iter__(self) -> Iterator[GroupRequest]:
        return self

    def __next__(self) -> GroupRequest:
        """The next group of the current version."""
        self._handle_waiting()
        queue = self._queues.get(self._current) if self._current is not None else None
        if queue is None:
            raise StopIteration
        request = queue.popleft()
        if not queue:
            del self._queues[request.policy_version]
        self._unfinished[request.lease_id] += len(request.indices)
        return request

    def _sample(self, engine: Engine, version: int) -> None:
        """Samples until no group of `version` is queued or running."""
        try:
            self._use(engine, version)
        except EchoError as error:
            _logger.warning("Policy version %d cannot be used: %s", version, error)
            self._current = None
            failed = self._queues.pop(version)
            self._send_failed([group.lease_id for group in failed], error)
            return
        began = time.perf_counter()
        try:
            for events in engine.sample(self):
                if events:
                    now = time.perf_counter()
                    self._report(events, now - began)
                    began = now
                self._handle_waiting()
                if self._pipe.ended:
                    return
        except BackendError as error:
            _logger.exception("The engine failed.")
            self._send_failed(list(self._unfinished), error)
            self._unfinished.clear()

    def _use(self, engine: Engine, version: int) -> None:
        if version == self._current:
            return
        if version not in self._policies:
            raise BackendError(
                "A group names a policy version that is not here.", got=str(version), code="unknown_policy"
            )
        engine.set_policy(version, self._policies[version])
        self._current = version

    def _report(self, events: list[EngineEvent], busy_s: float) -> None:
        finished = [event for event in events if isinstance(event, FinishedRollout)]
        for rollout in finished:
            self._unfinished[rollout.lease_id] -= 1
            if self._unfinished[rollout.lease_id] == 0:
                del self._unfinished[rollout.lease_id]
        if finished:
            self._pipe.send({"type": "finished", "busy_s": busy_s, **rollouts_to_frame(finished)})
        for event in events:
            if isinstance(event, GroupFailed):
                self._unfinished.pop(event.lease_id, 0)
                self._pipe.send({"type": "failed", "lease_id": event.lease_id, "code": event.code, "what": event.what})

    def _send_failed(self, lease_ids: list[int], error: EchoError) -> None:
        for lease_id in lease_ids:
            self._pipe.send({"type": "failed", "lease_id": lease_id, "code": error.code, "what": str(error)})


def main() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    Worker(ParentPipe()).run()


if __name__ == "__main__":
    main()
