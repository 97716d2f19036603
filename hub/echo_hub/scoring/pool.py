"""Scorers in separate processes, so that a crash, an endless loop or endless allocation ends only one call.

Each process holds the run's `Problems`, made from the settings, and calls their methods by name. Calls are sent in
batches and answered one by one. So if a process dies, its first unanswered call is the cause; later calls go to another
process. With an async scorer, a process runs many calls at once, and the cause is unknown. Then, after each death, half
as many calls are sent together, until the call that kills processes is alone. A call that ran out of memory is repeated
in a new process, because earlier calls may have used the memory. Results are MessagePack values: numbers, text, lists,
maps, arrays.

When a process ends, the processes that its scorers started end too. On Linux these are all descendants
(`echo_hub.scoring.warden`), on macOS processes of the same session. On Windows they keep running.

`echo_hub.scoring.processes` decides where processes run. If a machine is lost with its process, no call counts as the
cause: the calls go to another process, or wait for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.cluster.link import ChildLost, ClusterUnusable, RayLink
from echo_hub.config.sections import HubConfig
from echo_hub.judges.asking import Asked
from echo_hub.judges.judges import Judges
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.processes import Processes, ScoringProcess, answer_s, processes_of
from echo_shared.errors import ScorerError
from echo_shared.process.backoff import Restarts, backoff_s
from echo_shared.process.child import OUT_OF_MEMORY_STATUS, ChildExited, Death, describe_end

log = logging.getLogger(__name__)

ASYNC_CALLS: Final = 64
"""Number of calls of an `async def` scorer that one process runs at the same time. If the scorer's service can take
fewer, the scorer must limit itself with a semaphore.
"""
PART_CALLS: Final = 64
"""Maximum number of calls in one message to a process."""
MOST_SENT: Final = 8
"""Maximum number of messages that wait in a process's queue, including the message that the process works on."""
DEATHS_AT_START: Final = 3
"""Number of consecutive processes that may die before they are ready. After that the pool gives up."""
RESTART_S: Final = 0.5
"""Delay in seconds before a process that died at its start is started again. The delay doubles with each further death
in a row."""
LOSSES_OF_ONE: Final = 8
"""Number of processes that may be lost with their machines while they work on a part's first open call. Then the call
fails: perhaps it crashes machines."""
LOST_S: Final = 30.0
"""Longest delay in seconds before a process whose machine was lost is replaced. The first delay is RESTART_S."""
_CPP_MEMORY_ERROR: Final = "std::bad_alloc"
"""Text in a process's last log line if one of its C++ libraries ran out of memory."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """Calls that were submitted together. One process at a time runs the calls, until every call has a result."""

    method: str
    arguments: Sequence[Sequence[Any]]
    results: dict[int, Any] = field(default_factory=dict)
    """Results by index of the call."""
    width: int = PART_CALLS
    """Number of calls that are sent in one message. If a process dies while it runs several calls, this number is
    halved."""
    losses: int = 0
    """Number of processes that were lost with their machines since the part's last result."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def left(self) -> list[int]:
        """Indices of the part's calls that have no result yet."""
        return [place for place in range(len(self.arguments)) if place not in self.results]

    def answer(self, place: int, result: Any) -> None:
        self.losses = 0
        self.results[place] = result
        if len(self.results) == len(self.arguments) and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: ScorerError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Sent:
    """Calls of one part (`_Part`) in one message to a process. `open` holds the indices of the calls without an
    answer."""

    def __init__(self, part: _Part, places: list[int]) -> None:
        self.part = part
        self.places = places
        self.open = list(places)


class ScoringPool:
    """Pool of scoring processes; create it with `open`. The queue has no limit: callers wait for the results of their
    own calls."""

    def __init__(
        self, config: HubConfig, problems: Problems, *, processes: Processes, judges: Judges, is_patient: bool
    ) -> None:
        self.judges = judges
        self._config = config
        self._problems = problems
        self._processes = processes
        self._is_patient = is_patient
        self._width = _width(problems)
        self._waiting: asyncio.Queue[_Part] = asyncio.Queue()
        self._children: dict[int, ScoringProcess] = {}
        self._broken: ScorerError | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: HubConfig,
        problems: Problems,
        *,
        base_dir: Path,
        logs: Path,
        cluster: RayLink | None = None,
        is_patient: bool = True,
    ) -> AsyncIterator[ScoringPool]:
        """Start the processes, which log into the directory `logs`. No process is left after the block.

        `problems` are the run's own, already prepared, so that processes need not draw held-out sets again. `cluster`
        is needed if scoring.engine is "ray". If `is_patient`, the pool waits for judges and a cluster that do not
        answer. Raises ConfigError if a judge's key is not in the environment.
        """
        width = _width(problems)
        processes = processes_of(config, base_dir=base_dir, logs=logs, width=width, cluster=cluster)
        async with Judges.open(config.reward.judges, logs=logs, is_patient=is_patient) as judges:
            pool = cls(config, problems, processes=processes, judges=judges, is_patient=is_patient)
            num_processes = config.task.scorer_processes if problems.tasks else 0
            workers = [asyncio.create_task(pool._work(number)) for number in range(num_processes)]
            try:
                yield pool
            finally:
                for worker in workers:
                    worker.cancel()
                if workers:
                    await asyncio.wait(workers)
                for child in pool._children.values():  # A worker cancelled during cleanup leaves its child.
                    await child.stop()

    @property
    def absence(self) -> str:
        """Return why the pool waits for processes; "" if it has them."""
        return self._processes.absence

    @property
    def has_judges(self) -> bool:
        """True if judges (models that score completions) add components to the rewards."""
        return bool(self._config.reward.judges)

    async def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the results of `Problems.<method>` for each of `arguments`, in order. If a call failed, its result is
        a ScorerError.

        Raises ScorerError if no process can be started.
        """
        if self._broken is not None:
            raise self._broken
        starts = range(0, len(arguments), PART_CALLS)
        parts = [_Part(method=method, arguments=arguments[start : start + PART_CALLS]) for start in starts]
        for part in parts:
            self._waiting.put_nowait(part)
        await asyncio.gather(*(part.done for part in parts))
        return [part.results[place] for part in parts for place in range(len(part.arguments))]

    async def rewards(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `respond`, `training_respond` or `heldout_respond`, then weigh and sum the reward components, including
        those of judges.

        A reward is a float; if it has several components, they are attached to the float. An environment's answer is
        returned unchanged. Waits for judges.
        """
        is_training = method != "heldout_respond"
        weighing = self._problems.weighing if is_training else self._problems.heldout_weighing
        given = await self.judged(method, arguments, await self.call(method, arguments))
        return [
            weighing(asked[0]).total(one) if isinstance(one, Mapping) else one
            for asked, one in zip(arguments, given, strict=True)
        ]

    async def weighed(
        self, group_id: int, completions: Sequence[NDArray[np.int32]], given: float | Mapping[str, float]
    ) -> float | ScorerError:
        """Return the weighted reward of an ended episode, including the components of judges. `given` is the episode's
        score, or its components. Waits for judges."""
        (found,) = await self.judged("respond", [(group_id, completions)], [given])
        return found if isinstance(found, ScorerError) else self._problems.weighing(group_id).total(found)

    async def judged(self, method: str, arguments: Sequence[Sequence[Any]], given: Sequence[Any]) -> list[Any]:
        """Return `given`, the results of `method` for `arguments`. If a result has components, the judges' components
        are added to it.

        If a judge gives no value, the result becomes a ScorerError.
        """
        if not self.has_judges:
            return list(given)
        places = [place for place, one in enumerate(given) if isinstance(one, Mapping)]
        texts = await asyncio.to_thread(self._texts, method, [arguments[place] for place in places])
        found = list(given)
        for place, values in zip(places, await asyncio.gather(*map(self._judged, texts)), strict=True):
            found[place] = values if isinstance(values, ScorerError) else {**given[place], **values}
        return found

    def _texts(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Asked]:
        """Return the texts that the judges get about the episodes that `method` answered."""
        problems = self._problems
        if method == "trial_respond":
            return [problems.trial_asked(*one) for one in arguments]
        if method == "heldout_respond":
            return [problems.heldout_asked(*one) for one in arguments]
        return [problems.asked(*one) for one in arguments]

    async def _judged(self, asked: Asked) -> dict[str, float] | ScorerError:
        try:
            return await self.judges.values(asked)
        except ScorerError as error:
            return error

    async def _work(self, number: int) -> None:
        """Keep one process running and feed it calls, until cancelled or until no process can be started."""
        restarts = Restarts(most=DEATHS_AT_START, first_s=RESTART_S, limit_s=8 * RESTART_S)
        again: _Part | None = None
        losses = 0
        while self._broken is None:
            try:
                async with self._process(number) as child:
                    restarts.succeeded()
                    losses = 0
                    again = await self._feed(child, again)
            except ScorerError as error:
                self._broken = error
            except ChildLost as error:
                if isinstance(error, ClusterUnusable) and not self._is_patient:
                    self._broken = ScorerError("Nothing can be scored.", got=str(error))
                else:
                    await asyncio.sleep(backoff_s(losses, random.random(), first_s=RESTART_S, limit_s=LOST_S))
                    losses += 1
            except ChildExited as error:
                wait_s = restarts.died(random.random())
                extra = {"event": "scorer_died", "data": {"deaths": restarts.deaths}}
                log.warning(
                    "a process for scoring cannot be started (%d in a row): %s", restarts.deaths, error, extra=extra
                )
                if wait_s is None:
                    self._broken = ScorerError("No process for scoring can be started.", got=str(error))
                else:
                    await asyncio.sleep(wait_s)
            except Exception as error:
                # No caller handles the errors of this task. If it ended silently, callers would wait forever.
                log.exception("the scoring pool failed")
                self._broken = ScorerError("The scoring pool failed.", got=repr(error), do="See the hub's log.")
        if again is not None:
            again.fail(self._broken)
        while not self._waiting.empty():
            self._waiting.get_nowait().fail(self._broken)

    @contextlib.asynccontextmanager
    async def _process(self, number: int) -> AsyncIterator[ScoringProcess]:
        """Start a process, and yield it when it is ready. Raises ScorerError if the process cannot create the run's
        task, ChildExited if the process dies earlier, ChildLost if its machine is lost."""
        opening = {
            **self._processes.opening,
            "timeout_s": self._config.task.scorer_timeout_s,
            "memory_mb": self._config.task.scorer_memory_mb,
            "concurrency": self._width,
            "content_hash": self._problems.content_hash,
            "held_out": {key: asdict(drawn) for key, drawn in self._problems.held_out.items()},
        }
        child = self._children[number] = await self._processes.spawn(number)
        try:
            await child.open(opening)
            if "failed" in child.ready:
                raise ScorerError("A process for scoring cannot make the run's task.", got=child.ready["failed"])
            yield child
        finally:
            child.kill()
            await child.stop()
            del self._children[number]

    async def _feed(self, child: ScoringProcess, part: _Part | None) -> _Part | None:
        """Send parts (calls that belong together) to a process, starting with `part`, until the process dies.

        Return a part if one of its calls ran out of memory and earlier calls may have used the memory: the next process
        must start with this part. Otherwise return None.
        """
        under_way: deque[_Sent] = deque()
        is_new = is_open = True
        while True:
            while is_open and (part is not None or not under_way or self._may_send_ahead(len(under_way))):
                part = part or await self._waiting.get()
                sent = _Sent(part, part.left[: part.width])
                try:
                    await child.send({"method": part.method, "arguments": [part.arguments[at] for at in sent.places]})
                    under_way.append(sent)
                except (ChildExited, ChildLost):
                    self._waiting.put_nowait(part)  # No call of the message has started.
                    is_open = False
                part = None
            if not under_way:
                return None
            first = under_way[0]
            try:
                at, result = await self._answer(child)
            except ChildLost as error:
                self._take_back([sent.part for sent in under_way], error)
                raise
            if isinstance(result, ScorerDeath):
                under_way.popleft()
                for other in under_way:
                    self._waiting.put_nowait(other.part)
                if isinstance(result, _OutOfMemory) and not is_new:
                    return first.part
                self._blame(first.part, first.open, result)
                return None
            is_new = False
            place = first.open[0] if at is None else first.places[at]
            first.open.remove(place)
            first.part.answer(place, result)
            if not first.open:
                under_way.popleft()
                part = first.part if first.part.left else None

    def _take_back(self, parts: Sequence[_Part], error: ChildLost) -> None:
        """Put the parts of a lost process back into the queue. If LOSSES_OF_ONE processes were lost while they worked
        on the first part, fail its first open call."""
        first = parts[0]
        if not isinstance(error, ClusterUnusable):
            first.losses += 1
            first.width = max(1, first.width // 2) if self._width > 1 else first.width
        if first.losses >= LOSSES_OF_ONE:
            first.answer(first.left[0], ScorerError(f"Each of {first.losses} processes was lost.", got=str(error)))
        for part in parts:
            if part.left:
                self._waiting.put_nowait(part)

    def _may_send_ahead(self, num_sent: int) -> bool:
        """Return True if a process that is still busy may get another message. Enough parts must wait to keep all
        processes busy."""
        enough = self._waiting.qsize() >= self._config.task.scorer_processes
        return self._width == 1 and num_sent < MOST_SENT and enough

    def _blame(self, part: _Part, sent: Sequence[int], death: ScorerDeath) -> None:
        """Record a process's death as the result of the call that caused it. If calls run one at a time, the first
        unanswered call is the cause. If several ran at once, the cause is unknown; then half as many calls are sent
        next time."""
        if self._width == 1 or len(sent) == 1:
            part.answer(sent[0], death)
        else:
            part.width = (len(sent) + 1) // 2
        if part.left:
            self._waiting.put_nowait(part)

    async def _answer(self, child: ScoringProcess) -> tuple[int | None, Any]:
        """Return the next answer as a pair: the index of the call in its message (None for the first unanswered call),
        and the result.

        The result is a value, a ScorerError or a ScorerDeath. Raises ChildLost.
        """
        try:
            answer = await child.receive(within_s=answer_s(self._config, width=self._width))
        except ChildExited as error:
            return None, self._death(error)
        failed = "failed" in answer
        result = ScorerError("The scorer failed.", got=answer["failed"]) if failed else answer["value"]
        return answer.get("at"), result

    def _death(self, error: ChildExited) -> ScorerDeath:
        task, number = self._config.task, error.returncode or 0
        how = describe_end(number) + (f": {error.last_words}" if error.last_words else "")
        if error.death is Death.LATE or (sys.platform != "win32" and number == -signal.SIGALRM):
            return ScorerDeath(
                "The scorer took too long.", got=f"more than task.scorer_timeout_s = {task.scorer_timeout_s:g}"
            )
        if number == OUT_OF_MEMORY_STATUS or (number < 0 and _CPP_MEMORY_ERROR in error.last_words):
            limit = f"MemoryError at task.scorer_memory_mb = {task.scorer_memory_mb}"
            return _OutOfMemory("The scorer ran out of memory.", got=limit if number > 0 else f"{limit}; {how}")
        if error.death is Death.OUT_OF_MEMORY:
            return _OutOfMemory(
                "The scorer's process was killed, most likely because the machine ran out of memory.",
                got=how,
                do="Lower task.scorer_memory_mb or task.scorer_processes, or give this machine more memory.",
            )
        if error.death is Death.SIGNALLED:
            is_crash = sys.platform == "win32" or number != -signal.SIGKILL
            what = "The scorer crashed." if is_crash else "The scorer's process was killed, and not for its memory."
            return ScorerDeath(what, got=how, do=error.do)
        if error.death is Death.EXITED:
            return ScorerDeath("The scorer ended its process.", got=how, do=error.do)
        return ScorerDeath("The scorer's process died.", got=error.got, do=error.do)


def _width(problems: Problems) -> int:
    return ASYNC_CALLS if problems.is_async else 1


class ScorerDeath(ScorerError):
    """The call ended its process, or forced the pool to kill the process."""


class _OutOfMemory(ScorerDeath):
    """The process ran out of memory. A call gets this error as its result only if it was the first call of a new
    process. Any other call is repeated in a new process."""
