"""Supervise the process of a reward model, and send it completions. Loads no torch.

All waiting completions are sent together, up to `TOGETHER`. If the process dies, its unanswered completions are sent to
the next process one by one. So the completion that kills several processes is found. That completion then fails. If a
process cannot start or load its model, it is started again without limit, with growing delays, and completions wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from echo_hub.config.judge_section import RewardModelConfig
from echo_hub.judges.asking import Asked
from echo_hub.judges.base import FIRST_S, LIMIT_S, Absence, Counts
from echo_shared.errors import EchoError, ScorerError
from echo_shared.process.backoff import backoff_s
from echo_shared.process.child import ChildExited
from echo_shared.process.supervised import Command, SupervisedChild

log = logging.getLogger(__name__)

TOGETHER: Final = 256
"""Maximum number of completions sent to the process together."""
DEATHS_OF_ONE: Final = 3
"""If this many processes die with the same unanswered completion, that completion fails. After the first death, the
completion is sent alone."""
ANSWER_S: Final = 1_800.0
"""Timeout for each answer of a ready process, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    asked: Asked
    value: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deaths: int = 0
    """Number of processes that died before they answered this completion."""

    def answer(self, value: float) -> None:
        if not self.value.done():
            self.value.set_result(value)

    def fail(self, error: ScorerError) -> None:
        if not self.value.done():
            self.value.set_exception(error)


class RewardModel:
    """A judge that is a reward model in a child process. It works only inside the block of `working`."""

    def __init__(
        self,
        name: str,
        settings: RewardModelConfig,
        *,
        log: Path,
        is_patient: bool = True,
        first_s: float = FIRST_S,
    ) -> None:
        """`log` is the file for the process's output. If `is_patient`, completions wait while the process cannot be
        started."""
        self.name = name
        self.counts = Counts()
        self.absence = Absence(name)
        self._settings = settings
        self._log = log
        self._is_patient = is_patient
        self._first_s = first_s
        self._waiting: deque[_Job] = deque()
        self._again: deque[_Job] = deque()
        self._some = asyncio.Event()
        self._in_hand: dict[int, _Job] = {}
        self._child: SupervisedChild | None = None
        self._failures = 0
        """Number of failures in a row, since the last answer."""

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._child is None else self._child.pid

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[RewardModel]:
        """Let the judge work inside the block. The first request starts the process."""
        work = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def value(self, asked: Asked) -> float:
        job = _Job(asked=asked)
        self._waiting.append(job)
        self._some.set()
        self.counts.calls += 1
        return await job.value

    async def _run(self) -> None:
        try:
            while True:
                await self._some.wait()
                try:
                    await self._score()
                except (ChildExited, ScorerError) as error:
                    await self._rest(error)
                except Exception as error:
                    # No caller handles the errors of this task. If it ended, callers would wait forever.
                    log.exception("the judge %s failed", self.name)
                    await self._rest(ScorerError("The judge failed.", got=repr(error), do="See the hub's log."))
        finally:
            await self._stop()

    async def _score(self) -> None:
        """Score all waiting completions. Raises ChildExited if the process dies, and ScorerError if the model cannot be
        loaded."""
        if self._child is None:
            self._child = await self._start()
        while jobs := self._taken():
            self._in_hand = dict(enumerate(jobs))
            asked = [[job.asked.prompt, job.asked.completion] for job in jobs]
            await self._child.send({"asked": asked})
            while self._in_hand:
                answer = await self._child.receive(within_s=ANSWER_S)
                self._failures = 0
                self.absence.answered()
                job = self._in_hand.pop(answer["at"])
                if "failed" in answer:
                    self.counts.without_verdict += 1
                    job.fail(ScorerError(f"The judge {self.name} has no score.", got=answer["failed"]))
                else:
                    self.counts.tokens_read += answer["tokens"]
                    job.answer(answer["value"])
        self._some.clear()

    def _taken(self) -> list[_Job]:
        """Return the completions to send next. If dead processes left completions unanswered, return a single such
        completion. Otherwise return up to TOGETHER waiting completions."""
        while self._again:
            job = self._again.popleft()
            if not job.value.done():
                return [job]
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < TOGETHER:
            job = self._waiting.popleft()
            if not job.value.done():  # A future that is done was cancelled by the caller.
                jobs.append(job)
        return jobs

    async def _start(self) -> SupervisedChild:
        """Start the process. Raises ChildExited, and ScorerError if the model cannot be loaded."""
        command = Command(
            module="echo_hub.judges.worker",
            name="reward model",
            log=self._log,
            env={"OMP_NUM_THREADS": str(self._settings.threads), "TOKENIZERS_PARALLELISM": "false"},
        )
        child = await SupervisedChild.start(command, {"settings": self._settings.model_dump(mode="json")})
        if "failed" in child.ready:
            await child.stop()
            raise ScorerError("The reward model cannot work.", got=child.ready["failed"])
        return child

    async def _rest(self, error: EchoError) -> None:
        """After a failure, stop the process and pause before the next start. Put the completions that it has not
        answered back into the queue; completions that have killed too many processes fail."""
        had_begun = self._child is not None
        await self._stop()
        self.counts.unanswered += len(self._in_hand)
        jobs, self._in_hand = list(self._in_hand.values()), {}
        for job in jobs:
            job.deaths += had_begun
            if job.deaths < DEATHS_OF_ONE:
                self._again.append(job)
            else:
                job.fail(ScorerError(f"The process of the judge {self.name} dies of it.", got=str(error)))
        if not had_begun:
            self.absence.stays_away(str(error))
            if not self._is_patient:
                for job in (*self._again, *self._waiting):
                    job.fail(ScorerError(f"The judge {self.name} does not answer.", got=str(error)))
        else:
            log.warning("the process of the judge %s died, and is started again: %s", self.name, error)
        waits_s = backoff_s(self._failures, random.random(), first_s=self._first_s, limit_s=LIMIT_S)
        self._failures += 1
        await asyncio.sleep(waits_s)

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()  # Completions without an answer from this process are sent again.
            await child.stop()
