"""Supervise the verifier process and send it rollouts to check. Loads no torch.

A forward pass has a fixed cost: a few rollouts take about as long as a dozen. Waiting rollouts are therefore sent in
batches. A batch starts when an urgent rollout comes, when `ENOUGH` rollouts wait, when the oldest has waited for
`COMPANY_S`, or when `patience` versions were published while it waited.

Every rollout gets exactly one answer: evidence about each node that sampled a part, or a reason against checking the
rollout.

If the process dies, its unanswered rollouts go to the next process one by one. So a rollout that kills process after
process is found and given up. If processes die for another reason, all waiting rollouts are answered with that reason,
and the verifier tries again after a pause (`REST_S`): no check waits forever.

In a Ray cluster, processes can also disappear with their machines. The rollouts of a lost process are not to blame; the
next process gets them. While the cluster does not answer, checks wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.cluster.link import ChildLost, ClusterUnusable
from echo_hub.cluster.model_processes import ModelProcess, Program
from echo_hub.config.sections import HubConfig
from echo_hub.core.trust.evidence import Evidence
from echo_hub.learner import unquantized
from echo_hub.learner.environment import environment
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.drawn import DrawnRollout, NodeEvidence, unpack_evidence, unpack_spans
from echo_shared.errors import EchoError, LearnerError
from echo_shared.process.backoff import Restarts, backoff_s
from echo_shared.process.child import ChildExited
from echo_shared.records.rollout import pack_payload

log = logging.getLogger(__name__)

MOST_WAITING: Final = 16_384
"""Maximum number of waiting rollouts. Further ones are answered with `TOO_MANY` at once."""
TOO_MANY: Final = "Too many rollouts wait to be checked."
NOT_KEPT: Final = "The rollout's tokens were deleted."
TOGETHER: Final = 256
"""Maximum number of rollouts in one batch."""
TOKENS_TOGETHER: Final = 2**18
"""Maximum number of completion tokens in one batch, counted as if each completion had the greatest possible length. A
batch has at least one rollout."""
ENOUGH: Final = 64
"""Number of rollouts from which on larger batches save little. Measured time per rollout, on the built-in model with
three versions in a batch: 2.1 ms in a batch of 4, 0.7 ms of 24, 0.5 ms of 64, 0.4 ms of 256."""
COMPANY_S: Final = 6.0
"""Longest wait of a rollout for a fuller batch, in seconds. It delays the discovery of a node that begins to forge,
unless too many of that node's checks wait (`core.trust.rate.patience`)."""
DEATHS_OF_ONE: Final = 3
"""Number of processes that may die during the check of a rollout before the verifier gives the rollout up. After the
first death it is checked alone."""
DEATHS_IN_A_ROW: Final = 5
LOSSES_OF_ONE: Final = 8
"""Number of processes that may be lost with their machines during the check of a rollout before the verifier gives the
rollout up, because it may crash machines."""
RESTART_S: Final = 1.0
"""Seconds before the first restart, reduced at random by up to half. The wait doubles with every further death, up to
30 s."""
REST_S: Final = 300.0
"""Pause in seconds after DEATHS_IN_A_ROW deaths, or if the process reports that it cannot work. Rollouts that come
meanwhile are answered without a check."""


class CheckedRollouts(Protocol):
    """Reads the rollouts that the verifier checks, and the run's prompts. Implemented by
    `echo_hub.intake.episodes.DrawnRollouts`."""

    async def load(self, rollout_ids: Sequence[str]) -> Mapping[str, DrawnRollout | str]:
        """Return committed rollouts by id, or the reason why one cannot be checked. Rollouts whose tokens were deleted
        are left out."""

    def prompts(self) -> list[NDArray[np.int32]]:
        """Return some of the run's prompts as token ids. Blocks the calling thread."""


class Findings(Protocol):
    """Receives the verifier's answers. Implemented by `echo_hub.verify.verifying`."""

    async def checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        """Receive the evidence about the node of each span (part drawn by one node). `seconds`: processor or device
        time of the check.
        """

    async def abandoned(self, rollout_id: str, why: str) -> None:
        """Receive the reason why a rollout was not checked."""

    async def measured(self, rounding: str, policy_version: int, evidence: Evidence | None, seconds: float) -> None:
        """Receive the evidence that an honest engine with this rounding shows; None if it cannot be measured."""


def program(settings: LearnerSettings, *, worker: str = "echo_hub.verify.worker") -> Program:
    return Program(
        kind="verifier",
        name="verifying",
        module=unquantized.command(worker),
        counted="asked",
        env=environment(settings.learner),
    )


def verifier_settings(config: HubConfig, learner: LearnerSettings) -> LearnerSettings:
    """Return the learner's settings, changed for one process with the verifier's device, threads and precision. The
    base is not quantised, even if the learner's is, because nodes get the base unquantised."""
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
    """Number of processes that died while they checked this rollout."""
    losses: int = 0
    """Number of processes that were lost with their machines while they checked this rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patient:
    """A rollout that waits for a fuller batch: until `due_at` by the event loop's clock, or until `due_with` versions
    were published since the hub's start.
    """

    rollout_id: str
    due_at: float
    due_with: int


class Verifier:
    """Queue of checks, bounded by `MOST_WAITING`.

    `process`: None if nothing is verified. `directory`: the run, with its adapters. `gguf`: precision and path of the
    GGUF file that nodes use in place of the base, if any. `kept`: number of adapters that the process keeps in memory.
    `patience`: number of versions, at least 1, after whose publication the tokens of a waiting rollout may be deleted.
    """

    def __init__(
        self,
        process: ModelProcess | None,
        settings: LearnerSettings,
        *,
        directory: RunDirectory,
        kept: int,
        patience: int,
        rollouts: CheckedRollouts,
        gguf: tuple[str, str] | None = None,
    ) -> None:
        self._process = process
        self._settings = settings
        self._directory = directory
        self._opening = {"kept": kept, "gguf": gguf}
        self._patience = patience
        self._num_published = 0
        self._rollouts = rollouts
        self._to_measure: dict[str, int] = {}
        """Queued measurements: policy version to measure with, by rounding."""
        self._urgent: deque[str] = deque()
        self._patient: deque[_Patient] = deque()
        self._some = asyncio.Event()  # Set while a rollout or a measurement waits.
        self._now = asyncio.Event()  # Set when the waiting rollouts must be sent without waiting for a fuller batch.
        self._refused: asyncio.Queue[tuple[str, str]] = asyncio.Queue()  # (rollout id, reason); answered at once.
        self._again: deque[_Job] = deque()
        self._in_hand: dict[str, _Job] = {}
        self._losses = 0
        """Number of processes lost with their machines since the last answer."""

    @property
    def pid(self) -> int | None:
        """Return the process id; None if no verifier process runs on the hub's machine."""
        return None if self._process is None else self._process.pid

    @property
    def absence(self) -> str:
        """Return the reason why checks wait for the Ray cluster; empty if they do not wait."""
        return "" if self._process is None else self._process.absence

    def submit(self, rollout_id: str, *, is_urgent: bool) -> None:
        """Queue a committed rollout for its check. A rollout that is not urgent may wait for a fuller batch."""
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
        """Queue the measurement of a rounding with this version. Measurements precede all checks that have not
        started."""
        self._to_measure[rounding] = policy_version
        self._some.set()
        self._now.set()

    def published(self) -> None:
        """Count one more published version. Send waiting rollouts whose tokens may be deleted soon."""
        self._num_published += 1
        if self._patient and self._patient[0].due_with <= self._num_published:
            self.hasten()

    def hasten(self) -> None:
        """Send the waiting rollouts without waiting for a fuller batch."""
        if self._num_waiting:
            self._now.set()

    @property
    def _num_waiting(self) -> int:
        return len(self._urgent) + len(self._patient)

    @property
    def _most_together(self) -> int:
        return max(1, min(TOGETHER, TOKENS_TOGETHER // self._settings.max_tokens))

    async def run(self, findings: Findings) -> None:
        """Check and measure until cancelled. Each rollout is answered by one call of `checked` or `abandoned`, each
        measurement by one call of `measured`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refuse(findings))
            if self._process is not None:
                tasks.create_task(self._check(self._process, findings))

    async def _refuse(self, findings: Findings) -> None:
        while True:
            await findings.abandoned(*await self._refused.get())

    async def _check(self, process: ModelProcess, findings: Findings) -> None:
        restarts = Restarts(most=DEATHS_IN_A_ROW, first_s=RESTART_S, limit_s=30.0)
        try:
            while True:
                try:
                    await self._measure(process, findings, restarts)
                    await self._ask(process, findings, restarts)
                    await self._take(findings)
                except ChildLost as error:
                    if not isinstance(error, ClusterUnusable):
                        log.warning("the verifier process is lost: %s", error, extra={"event": "verifier_died"})
                    await self._take_back(process, error, findings)
                    await asyncio.sleep(backoff_s(self._losses, random.random(), first_s=RESTART_S, limit_s=30.0))
                    self._losses += 1
                except ChildExited as error:
                    wait_s = restarts.died(random.random())
                    extra = {"event": "verifier_died", "data": {"deaths": restarts.deaths}}
                    log.warning("the verifier died (%d in a row): %s", restarts.deaths, error, extra=extra)
                    if wait_s is None:
                        await self._rest(process, error, findings)
                        restarts.succeeded()
                    else:
                        await self._take_back(process, error, findings)
                        await asyncio.sleep(wait_s)
                except LearnerError as error:
                    await self._rest(process, error, findings)
        finally:
            await process.stop()

    async def _take(self, findings: Findings) -> None:
        """Fill `_in_hand` with the next batch: one rollout that a dead process left unanswered, or all waiting rollouts
        once they are due. Return early if the measurement of a rounding is queued."""
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
                jobs = await self._loaded(self._taken(self._most_together), findings)
            self._in_hand = {job.drawn.rollout_id: job for job in jobs}

    def _taken(self, most: int) -> list[str]:
        ids: list[str] = []
        while len(ids) < most and self._num_waiting:
            ids.append(self._urgent.popleft() if self._urgent else self._patient.popleft().rollout_id)
        if not self._num_waiting:
            self._some.clear()
        if not self._urgent and self._num_waiting < min(ENOUGH, self._most_together):
            self._now.clear()
        return ids

    async def _loaded(self, rollout_ids: Sequence[str], findings: Findings) -> list[_Job]:
        found = await self._rollouts.load(rollout_ids)
        jobs = []
        for rollout_id in rollout_ids:
            drawn = found.get(rollout_id, NOT_KEPT)
            if isinstance(drawn, str):
                await findings.abandoned(rollout_id, drawn)
            else:
                jobs.append(_Job(drawn=drawn))
        return jobs

    async def _measure(self, process: ModelProcess, findings: Findings, restarts: Restarts) -> None:
        """Measure all queued roundings. A rounding without an answer stays queued. Raises ChildExited, ChildLost and
        LearnerError."""
        while self._to_measure:
            if not process.is_ready:
                await process.start(self._opening)
            version = min(self._to_measure.values())
            roundings = [name for name, wanted in self._to_measure.items() if wanted == version]
            adapters = {version: self._directory.adapter(version)} if version else {}
            prompts = await asyncio.to_thread(self._rollouts.prompts)
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
                    await findings.measured(rounding, version, None, 0.0)
                else:
                    await findings.measured(rounding, version, unpack_evidence(answer["evidence"]), answer["seconds"])
        if not self._num_waiting:
            self._some.clear()
        if not self._urgent and self._num_waiting < min(ENOUGH, self._most_together):
            self._now.clear()

    async def _ask(self, process: ModelProcess, findings: Findings, restarts: Restarts) -> None:
        """Check all rollouts in `_in_hand`; start a process if none runs. Raises ChildExited and ChildLost, or
        LearnerError if the process reports that it cannot work."""
        if not process.is_ready:
            await process.start(self._opening)
        if not self._in_hand:
            return
        drawn = [job.drawn for job in self._in_hand.values()]
        versions = {span.policy_version for one in drawn for span in one.spans} - {0}
        adapters = {version: self._directory.adapter(version) for version in versions}
        await process.send({"asked": [pack_payload(one) for one in drawn]}, adapters)
        while self._in_hand:
            answer = await process.receive()
            restarts.succeeded()
            self._losses = 0
            rollout_id = answer["rollout_id"]
            del self._in_hand[rollout_id]
            if "cannot" in answer:
                await findings.abandoned(rollout_id, answer["cannot"])
            else:
                await findings.checked(rollout_id, unpack_spans(answer["spans"]), answer["seconds"])

    async def _take_back(self, process: ModelProcess, error: ChildExited | ChildLost, findings: Findings) -> None:
        """Stop the process, and queue again the rollouts that it left unanswered. Give up those that too many processes
        died of."""
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
                await findings.abandoned(job.drawn.rollout_id, f"The verifier process fails on this rollout. {error}")

    async def _give_up_measuring(self, findings: Findings) -> None:
        while self._to_measure:
            rounding, version = self._to_measure.popitem()
            await findings.measured(rounding, version, None, 0.0)

    async def _rest(self, process: ModelProcess, error: EchoError, findings: Findings) -> None:
        """Answer all waiting rollouts, and those that come within `REST_S`, with the reason that the verifier fails."""
        log.error("no rollout can be verified for %.0f s: %s", REST_S, error, extra={"event": "verifier_died"})
        why = f"The verifier process keeps failing. {error}"
        await process.stop()
        await self._give_up_measuring(findings)
        jobs: Iterable[_Job] = (*self._in_hand.values(), *self._again)
        self._in_hand = {}
        self._again.clear()
        for job in jobs:
            await findings.abandoned(job.drawn.rollout_id, why)
        clock = asyncio.get_running_loop().time
        ends_at = clock() + REST_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at):
                    await self._some.wait()
                await self._give_up_measuring(findings)
                for rollout_id in self._taken(MOST_WAITING):
                    await findings.abandoned(rollout_id, why)
            if clock() >= ends_at:
                return
