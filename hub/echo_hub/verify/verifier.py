"""Keeps the verifier process alive and gives it what is to be checked; loads no torch.

A few rollouts cost about as much as a dozen: a pass through the model costs something in itself. So whatever waits is
loaded and handed over together, and what nobody waits for is first kept for company: until something urgent comes,
`ENOUGH` wait, or the oldest has waited for `COMPANY_S`, or for as many published versions as it has `patience` for.

Every rollout is answered for exactly once, with what it shows of each node that drew some of it, or with the reason why
that cannot be told.

When the process dies, what it had in hand goes to the next one, one by one: a rollout that ends process after process
is told from those that were with it, and given up. When processes die for whatever else, all that waits is answered
with that reason, and after a rest it is tried again: no check is waited for for ever.

In a Ray cluster the process may be lost through no fault of what it had in hand, which then goes to another; and while
the cluster is away, checks wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.cluster.link import ChildLost, ClusterUnusable
from echo_hub.cluster.model_processes import ModelProcess, Program
from echo_hub.config.sections import HubConfig
from echo_hub.core.trust.evidence import Evidence
from echo_hub.learner import unquantized
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.drawn import DrawnRollout, NodeEvidence, pack, unpack_evidence, unpack_spans
from echo_shared.backoff import Restarts, backoff_s
from echo_shared.child import ChildExited
from echo_shared.errors import EchoError, LearnerError

log = logging.getLogger(__name__)

MOST_WAITING: Final = 16_384
"""Rollouts that wait at most; more are answered with `TOO_MANY` at once."""
TOO_MANY: Final = "Too many rollouts wait to be checked."
NOT_KEPT: Final = "Its tokens are not kept any more."
TOGETHER: Final = 256
"""Rollouts that the process has in hand at most."""
TOKENS_TOGETHER: Final = 2**18
"""Of their completions, at most, if each were as long as it may be; one is always taken."""
ENOUGH: Final = 64
"""More of them cost little less each: with the built-in model and three versions among them, one of 4 takes 2.1 ms, one
of 24 0.7 ms, one of 64 0.5 ms, one of 256 0.4 ms."""
COMPANY_S: Final = 6.0
"""A node that goes bad is found out so much later, or once too many of its checks wait (`core.trust.rate.patience`)."""
DEATHS_OF_ONE: Final = 3
"""Processes that end with a rollout in hand before it is given up; it is by itself from the second on."""
DEATHS_IN_A_ROW: Final = 5
LOSSES_OF_ONE: Final = 8
"""Processes that are lost with a rollout in hand before it is given up: something in it may end machines."""
RESTART_S: Final = 1.0
"""Seconds before the first new start, or up to half less; doubled with every further death, up to half a minute."""
REST_S: Final = 300.0
"""After so many deaths in a row, or where the process cannot work at all."""
Report = Callable[[str, tuple[NodeEvidence, ...], float], Awaitable[None]]
"""(rollout id, what each span shows of whoever drew it, processor or device seconds that it took)"""
Measured = Callable[[str, int, Evidence | None, float], Awaitable[None]]
"""(rounding, policy version, what an honest engine with it shows, seconds); None where that cannot be told."""
Cannot = Callable[[str, str], Awaitable[None]]
"""(rollout id, why it cannot be checked)"""
Prompts = Callable[[], list[NDArray[np.int32]]]
"""Some of the run's prompts as token ids."""
Load = Callable[[Sequence[str]], Awaitable[Mapping[str, DrawnRollout | str]]]
"""Committed rollouts by their ids, or why one cannot be checked; those that are not kept any more are left out."""


def program(settings: LearnerSettings, *, worker: str = "echo_hub.verify.worker") -> Program:
    """The verifier's process."""
    return Program(
        kind="verifier",
        name="verifying",
        module=unquantized.command(worker),
        counted="asked",
        env={"OMP_NUM_THREADS": str(settings.learner.threads)},
    )


def verifier_settings(config: HubConfig, learner: LearnerSettings) -> LearnerSettings:
    """Those of a learner alone in its process, with the verifier's device, threads and precision, and all bits of the
    base, as the nodes have it."""
    alone = learner.learner.model_copy(
        update={
            "device": config.trust.verifier_device,
            "threads": config.trust.verifier_threads,
            "processes": 1,
            "hosts": 1,
            "address": "",
            "base_bits": 0,
            "precision": config.trust.verifier_precision,
            "gradient_checkpointing": False,
        }
    )
    return learner.model_copy(update={"learner": alone})


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    drawn: DrawnRollout
    deaths: int = 0
    """Of processes that had it in hand."""
    losses: int = 0
    """Likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patient:
    """Waits for company, but no longer than until then: by the event loop's clock, and by the count of versions."""

    rollout_id: str
    due_at: float
    due_with: int


class Verifier:
    """`process`: None = nothing is verified. `directory`: where the adapters are; `kept`: of them the process keeps so
    many at hand. `patience`: published versions, at least 1, for which the tokens of a rollout are surely kept. Its
    queue is bounded: `MOST_WAITING`."""

    def __init__(
        self,
        process: ModelProcess | None,
        settings: LearnerSettings,
        *,
        directory: RunDirectory,
        kept: int,
        patience: int,
        load: Load,
        prompts: Prompts,
    ) -> None:
        self._process = process
        self._settings = settings
        self._directory = directory
        self._kept = kept
        self._patience = patience
        self._num_published = 0
        self._load = load
        self._prompts = prompts
        self._to_measure: dict[str, int] = {}
        """Roundings, each with the policy version by which it is to be measured."""
        self._urgent: deque[str] = deque()
        self._patient: deque[_Patient] = deque()
        self._some = asyncio.Event()  # Something waits,
        self._now = asyncio.Event()  # and is to be taken at once.
        self._refused: asyncio.Queue[tuple[str, str]] = asyncio.Queue()  # Emptied at once, whatever else goes on.
        self._again: deque[_Job] = deque()
        self._in_hand: dict[str, _Job] = {}
        self._losses = 0
        """Processes that were lost in a row."""

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none beside the hub."""
        return None if self._process is None else self._process.pid

    @property
    def absence(self) -> str:
        """Why checks wait for the cluster; empty = they do not."""
        return "" if self._process is None else self._process.absence

    def submit(self, rollout_id: str, *, is_urgent: bool) -> None:
        """Has a committed rollout checked, when its turn comes. One that is not urgent waits for company."""
        if self._process is None:
            self._refused.put_nowait((rollout_id, "This hub verifies nothing: trust.verifier is off."))
            return
        if self._num_waiting >= MOST_WAITING:
            self._refused.put_nowait((rollout_id, TOO_MANY))
            return
        if is_urgent:
            self._urgent.append(rollout_id)
        else:
            due_at = asyncio.get_running_loop().time() + COMPANY_S
            due_with = self._num_published + self._patience
            self._patient.append(_Patient(rollout_id=rollout_id, due_at=due_at, due_with=due_with))
        self._some.set()
        if is_urgent or self._num_waiting >= min(ENOUGH, self._most_together):
            self._now.set()

    def measure(self, rounding: str, policy_version: int) -> None:
        """Has a rounding measured by this version, before anything that is not in hand yet is checked."""
        self._to_measure[rounding] = policy_version
        self._some.set()
        self._now.set()

    def published(self) -> None:
        """Another version is."""
        self._num_published += 1
        if self._patient and self._patient[0].due_with <= self._num_published:
            self.hasten()

    def hasten(self) -> None:
        """What waits for company goes now."""
        if self._num_waiting:
            self._now.set()

    @property
    def _num_waiting(self) -> int:
        return len(self._urgent) + len(self._patient)

    @property
    def _most_together(self) -> int:
        return max(1, min(TOGETHER, TOKENS_TOGETHER // self._settings.max_tokens))

    async def run(self, report: Report, cannot: Cannot, measured: Measured) -> None:
        """Checks for ever; each rollout is answered by a call of one of the first two, each measurement by the last."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refuse(cannot))
            if self._process is not None:
                tasks.create_task(self._check(self._process, report, cannot, measured))

    async def _refuse(self, cannot: Cannot) -> None:
        while True:
            await cannot(*await self._refused.get())

    async def _check(self, process: ModelProcess, report: Report, cannot: Cannot, measured: Measured) -> None:
        restarts = Restarts(most=DEATHS_IN_A_ROW, first_s=RESTART_S, limit_s=30.0, jitter=random.random)
        try:
            while True:
                try:
                    await self._measure(process, measured, restarts)
                    await self._ask(process, report, cannot, restarts)
                    await self._take(cannot)
                except ChildLost as error:
                    if not isinstance(error, ClusterUnusable):
                        log.warning("the verifier is lost: %s", error, extra={"event": "verifier_died"})
                    await self._take_back(process, error, cannot)
                    await asyncio.sleep(backoff_s(self._losses, random.random(), first_s=RESTART_S, limit_s=30.0))
                    self._losses += 1
                except ChildExited as error:
                    wait_s = restarts.died()
                    extra = {"event": "verifier_died", "data": {"deaths": restarts.deaths}}
                    log.warning("the verifier died (%d in a row): %s", restarts.deaths, error, extra=extra)
                    if wait_s is None:
                        await self._rest(process, error, cannot, measured)
                        restarts.succeeded()
                    else:
                        await self._take_back(process, error, cannot)
                        await asyncio.sleep(wait_s)
                except LearnerError as error:
                    await self._rest(process, error, cannot, measured)
        finally:
            await process.stop()

    async def _take(self, cannot: Cannot) -> None:
        """Puts in hand what is next: one that was in hand when a process died, or all that waits, once that is due."""
        while not self._in_hand and not self._to_measure:
            if self._again:
                jobs = [self._again.popleft()]
            else:
                await self._some.wait()
                if self._to_measure:
                    return
                if not self._now.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(self._patient[0].due_at):
                            await self._now.wait()
                if self._to_measure:
                    return
                jobs = await self._loaded(self._taken(self._most_together), cannot)
            self._in_hand = {job.drawn.rollout_id: job for job in jobs}

    def _taken(self, most: int) -> list[str]:
        """Of what waits: the urgent ones first, then the oldest."""
        ids: list[str] = []
        while len(ids) < most and self._num_waiting:
            ids.append(self._urgent.popleft() if self._urgent else self._patient.popleft().rollout_id)
        if not self._num_waiting:
            self._some.clear()
        if not self._urgent and self._num_waiting < min(ENOUGH, self._most_together):
            self._now.clear()
        return ids

    async def _loaded(self, rollout_ids: Sequence[str], cannot: Cannot) -> list[_Job]:
        found = await self._load(rollout_ids)
        jobs = []
        for rollout_id in rollout_ids:
            drawn = found.get(rollout_id, NOT_KEPT)
            if isinstance(drawn, str):
                await cannot(rollout_id, drawn)
            else:
                jobs.append(_Job(drawn=drawn))
        return jobs

    async def _measure(self, process: ModelProcess, measured: Measured, restarts: Restarts) -> None:
        """Measures what is to be measured. Raises as `_ask`; what was not answered is then asked for again."""
        while self._to_measure:
            if not process.is_ready:
                await process.start({"kept": self._kept})
            version = min(self._to_measure.values())
            roundings = [name for name, wanted in self._to_measure.items() if wanted == version]
            adapters = {version: self._directory.adapter(version)} if version else {}
            prompts = await asyncio.to_thread(self._prompts)
            await process.send({"asked": roundings, "version": version, "prompts": prompts}, adapters)
            for _ in roundings:
                answer = await process.receive()
                restarts.succeeded()
                self._losses = 0
                rounding = answer["rounding"]
                if self._to_measure.get(rounding) == version:
                    del self._to_measure[rounding]
                if "cannot" in answer:
                    log.warning("cannot measure %s: %s", rounding, answer["cannot"], extra={"event": "not_measured"})
                    await measured(rounding, version, None, 0.0)
                else:
                    await measured(rounding, version, unpack_evidence(answer["evidence"]), answer["seconds"])
        if not self._num_waiting:
            self._some.clear()
        if not self._urgent and self._num_waiting < min(ENOUGH, self._most_together):
            self._now.clear()

    async def _ask(self, process: ModelProcess, report: Report, cannot: Cannot, restarts: Restarts) -> None:
        """Has all that is in hand checked, by a process that is started where there is none. Raises ChildExited and
        ChildLost, or LearnerError when the process cannot work at all."""
        if not process.is_ready:
            await process.start({"kept": self._kept})
        if not self._in_hand:
            return
        drawn = [job.drawn for job in self._in_hand.values()]
        versions = {span.policy_version for one in drawn for span in one.spans} - {0}
        adapters = {version: self._directory.adapter(version) for version in versions}
        await process.send({"asked": [pack(one) for one in drawn]}, adapters)
        while self._in_hand:
            answer = await process.receive()
            restarts.succeeded()
            self._losses = 0
            rollout_id = answer["rollout_id"]
            del self._in_hand[rollout_id]
            if "cannot" in answer:
                await cannot(rollout_id, answer["cannot"])
            else:
                await report(rollout_id, unpack_spans(answer["spans"]), answer["seconds"])

    async def _take_back(self, process: ModelProcess, error: ChildExited | ChildLost, cannot: Cannot) -> None:
        """What a process had in hand when it died, or was lost, is asked for again."""
        had_begun = process.is_ready and not isinstance(error, ClusterUnusable)
        await process.stop()
        jobs, self._in_hand = list(self._in_hand.values()), {}
        for job in jobs:
            if isinstance(error, ChildLost):
                job.losses += had_begun
            else:
                job.deaths += had_begun
            if job.deaths < DEATHS_OF_ONE and job.losses < LOSSES_OF_ONE:
                self._again.append(job)
            else:
                await cannot(job.drawn.rollout_id, f"The verifier dies of it. {error}")

    async def _give_up_measuring(self, measured: Measured) -> None:
        while self._to_measure:
            rounding, version = self._to_measure.popitem()
            await measured(rounding, version, None, 0.0)

    async def _rest(self, process: ModelProcess, error: EchoError, cannot: Cannot, measured: Measured) -> None:
        """Answers all that waits, and all that comes for a while."""
        log.error("nothing can be verified for %.0f s: %s", REST_S, error, extra={"event": "verifier_died"})
        why = f"No verifier can be kept at work. {error}"
        await process.stop()
        await self._give_up_measuring(measured)
        jobs: Iterable[_Job] = (*self._in_hand.values(), *self._again)
        self._in_hand = {}
        self._again.clear()
        for job in jobs:
            await cannot(job.drawn.rollout_id, why)
        clock = asyncio.get_running_loop().time
        ends_at = clock() + REST_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at):
                    await self._some.wait()
                await self._give_up_measuring(measured)
                for rollout_id in self._taken(MOST_WAITING):
                    await cannot(rollout_id, why)
            if clock() >= ends_at:
                return
