"""A run's shell: carries out the work loop's effects, with the run's spool (store of rollouts), fetcher and engine."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, assert_never
from weakref import WeakValueDictionary

from echo_node.core.effects import (
    AbandonFetch,
    AddPolicy,
    AskForReceipts,
    CancelLease,
    DropPolicy,
    Effect,
    EndEngine,
    EngineEffect,
    FetchArtefact,
    ForgetLease,
    LimitDuty,
    RecordReceipts,
    RemoveArtefact,
    ResendSpooled,
    ResumeEngine,
    ScoreCompletion,
    SendMessage,
    SpoolLease,
    SpoolRollout,
    StartEngine,
    Stop,
    SubmitGroup,
    SuspendEngine,
)
from echo_node.core.events import ArtefactReady, Event, FetchFailed, Incoming
from echo_node.core.time_left import TimeLeft
from echo_node.core.troubles import TroubleCode, trouble_of
from echo_node.core.work import WorkLoop
from echo_node.engine.making import EngineMaker
from echo_node.engine.supervisor import EngineFiles, EngineSupervisor
from echo_node.host.clock import running_s
from echo_node.host.spool import Spool
from echo_node.host.spool_writer import SpoolWriter
from echo_node.host.trouble_log import TroubleLog
from echo_node.net.client import HubClient
from echo_node.net.fetcher import UNREADABLE, Fetcher
from echo_node.net.online import Online
from echo_shared.cage.description import Held
from echo_shared.errors import RemoteProtocolError, StorageError, SwarmError
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.wire.messages import ArtefactOffer, Fetched, ReceiptsWanted

log = logging.getLogger(__name__)

_ENGINE: Final = "the engine"
ASK_BATCH: Final = 512
"""Maximum number of rollouts in one request for receipts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts with which a run's shell works."""

    spool: Spool
    fetcher: Fetcher
    engines: EngineMaker
    client: HubClient
    inbox: asyncio.Queue[Incoming]
    derived: Path
    logs: Path
    capacity_factor: int
    troubles: TroubleLog = field(default_factory=TroubleLog)
    online: Online = field(default_factory=Online)


class RunShell:
    """The shell (I/O) around the node's core, for the current run. Call `open`, then `handle` for each event, then
    `close`.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.fetcher = parts.fetcher
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetches: dict[int | None, asyncio.Task[None]] = {}
        """Newest task that fetches each artefact, waiting or running; the key is the policy version, None = the base
        model.
        """
        self._files: WeakValueDictionary[int | None, asyncio.Lock] = WeakValueDictionary()
        """Lock of each artefact's files. The running job holds the lock; waiting jobs keep it from being
        garbage-collected.
        """
        self._answers: dict[int | None, ArtefactReady | FetchFailed] = {}
        """Results of ended fetches that the work loop has not handled yet. If a fetch is abandoned, its result is
        removed.
        """
        self._engines: dict[str, EngineSupervisor] = {}
        """Newest engine of each device."""
        self._work: WorkLoop | None = None
        self.writer = SpoolWriter(parts.spool, parts.inbox, parts.troubles)
        self.fetching: dict[int | None, tuple[int, int]] = {}
        """(bytes received, total bytes) of each running fetch."""
        self.time_left = TimeLeft()
        self.stopped = False
        self.failure: BaseException | None = None
        """Error that ended one of the tasks that the shell has started; None: no task has failed."""

    @property
    def work(self) -> WorkLoop:
        assert self._work is not None, "the shell is not open"
        return self._work

    async def open(self, newest_version: int) -> None:
        """Restore the state of an earlier process. Raises StorageError."""
        unfinished = await asyncio.to_thread(self._parts.spool.unfinished)
        unacked = await asyncio.to_thread(self._parts.spool.unacked_ids)
        self._work = WorkLoop(
            capacity_factor=self._parts.capacity_factor,
            unfinished=unfinished,
            unacked=unacked,
            on_disk=await asyncio.to_thread(self.fetcher.take_up, newest_version),
            devices=self._parts.engines.devices,
        )
        self._start(self.writer.run(), name="spool writer")

    async def handle(self, event: Event) -> None:
        """Handle an event, and carry out the work loop's effects in order."""
        if isinstance(event, ArtefactReady | FetchFailed):
            if self._answers.get(event.policy_version) is not event:
                return  # The fetch was abandoned after its end; its files are being removed.
            del self._answers[event.policy_version]
        for effect in self.work.handle(event, running_s(), random.random()):
            await self._carry_out(effect)
        for device, problem in self.work.engine_problems.items():
            if problem is not None:
                self._parts.troubles.begin(_engine_of(device), problem)
            else:
                self._parts.troubles.end(_engine_of(device))

    def unwanted(self, info_hashes: Iterable[bytes]) -> None:
        """Stop serving these carriers (encrypted files of artefacts), which no node fetches any more."""
        self._start(self.fetcher.unwanted(tuple(info_hashes)), name="unwanted carriers")

    async def close(self) -> None:
        """End all tasks and the engine's process. Queued spool writes are still carried out and counted."""
        for device in self._parts.engines.devices:
            self._parts.troubles.end(_engine_of(device))
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self.writer.finish)
        await self.writer.refresh()
        await asyncio.to_thread(self._parts.spool.close)

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendMessage(message=message):
                await self._parts.client.send(message)
            case SpoolLease() | ForgetLease() | SpoolRollout() | RecordReceipts():
                self.writer.put(effect)
            case ResendSpooled():
                await self._resend()
            case AskForReceipts():
                await self._ask_for_receipts()
            case FetchArtefact(policy_version=version, offer=offer, gguf=gguf):
                self._fetches[version] = self._file_job(version, lambda: self._fetch(version, offer, gguf))
            case AbandonFetch(policy_version=unwanted):
                self._answers.pop(unwanted, None)
                self._parts.troubles.end(_fetch_of(unwanted))
                if (fetch := self._fetches.get(unwanted)) is not None:
                    fetch.cancel()
                self._file_job(unwanted, lambda: self.fetcher.abandon(unwanted))
            case RemoveArtefact(policy_version=unwanted):
                self._answers.pop(unwanted, None)
                self._file_job(unwanted, lambda: self.fetcher.remove(unwanted))
            case (
                StartEngine()
                | EndEngine()
                | SuspendEngine()
                | ResumeEngine()
                | LimitDuty()
                | AddPolicy()
                | DropPolicy()
                | SubmitGroup()
                | CancelLease()
                | ScoreCompletion()
            ):
                await self._tell_engine(effect)
            case Stop():
                self.stopped = True
            case _:
                assert_never(effect)

    async def _tell_engine(self, effect: EngineEffect) -> None:
        if isinstance(effect, StartEngine):
            engine = self._parts.engines.make(self._engine_files(effect.device), effect.device)
            self._engines[effect.device] = engine
            self._start(engine.run(effect.after_s, effect.max_width), name=f"engine {effect.device}".rstrip())
            return
        engine = self._engines[effect.device]  # The engine exists: the work loop uses it only after its StartEngine.
        match effect:
            case EndEngine():
                self._start(engine.end(), name="engine's end")
            case SuspendEngine():
                engine.suspend()
            case ResumeEngine():
                engine.resume()
            case LimitDuty(share=share):
                await engine.limit_duty(share)
            case AddPolicy(policy_version=added):
                await engine.add_policy(added, None if added == 0 else self.fetcher.directory(added))
            case DropPolicy(policy_version=dropped):
                await engine.drop_policy(dropped)
            case SubmitGroup(request=request):
                await engine.submit(request)
            case CancelLease(lease_id=lease_id):
                await engine.cancel(lease_id)
            case ScoreCompletion(request=completion):
                await engine.score(completion)
            case _:
                assert_never(effect)

    @property
    def engine_stage(self) -> str:
        """Sentence about what the engine does before its first work. Of several engines, the first one that is not
        ready counts. Empty = all are ready, or none runs.
        """
        return next((engine.stage for engine in self._engines.values() if engine.stage), "")

    @property
    def preparing(self) -> dict[str, tuple[int, int]]:
        """Progress of unpacking and conversion, between a fetch and the engine's start: (bytes done, total bytes) by
        title.
        """
        found = {f"{artefact_title(v)}, checked and unpacked": got for v, got in self.fetcher.unpacking.items()}
        converting = [done for engine in self._engines.values() if (done := engine.conversion) is not None]
        if converting:
            found["The base model, converted for llama.cpp"] = converting[0]
        return found

    @property
    def engine_pids(self) -> dict[str, int]:
        """Process id of each running engine, by device."""
        return {device: engine.pid for device, engine in self._engines.items() if engine.pid is not None}

    @property
    def kept_keys(self) -> KeptKeys:
        """Keys and values that all engines keep for later turns."""
        return sum((engine.kept for engine in self._engines.values()), KeptKeys())

    @property
    def engine_held(self) -> Held | None:
        """Protections of the engine's cage (sandbox), or of the weakest cage of several engines; None = no engine
        runs.
        """
        known = [engine.held for engine in self._engines.values() if engine.held is not None]
        return max(known, key=lambda held: len(held.lacks), default=None)

    def _engine_files(self, device: str) -> EngineFiles:
        base_dir = self.fetcher.directory(None)
        content = self.fetcher.base_content
        name = f"engine-{device.replace(':', '-')}.log" if device else "engine.log"
        return EngineFiles(
            base_dir=base_dir,
            base_content=content,
            policies_dir=base_dir.parent,
            derived_dir=self._parts.derived / base_dir.name / content,
            log=self._parts.logs / name,
        )

    async def _resend(self) -> None:
        after = ""
        while rollouts := await asyncio.to_thread(self._parts.spool.unacked, after):
            for rollout in rollouts:
                await self._parts.client.send(rollout)
            after = rollouts[-1].rollout_id

    async def _ask_for_receipts(self) -> None:
        ids = await asyncio.to_thread(self._parts.spool.without_final_receipt)
        for start in range(0, len(ids), ASK_BATCH):
            await self._parts.client.send(ReceiptsWanted(rollout_ids=tuple(ids[start : start + ASK_BATCH])))

    async def _fetch(self, version: int | None, offer: ArtefactOffer, gguf: ArtefactOffer | None) -> None:
        if gguf is not None and self._parts.engines.reads_gguf:
            offer = gguf

        def progress(done: int, total: int) -> None:
            self.fetching[version] = (done, total)

        try:
            fetched = await self._parts.online.run(lambda: self.fetcher.fetch(offer, version, on_progress=progress))
        except (RemoteProtocolError, SwarmError, StorageError) as error:
            trouble = trouble_of(error, otherwise=TroubleCode.FETCH)
            what = f"{artefact_title(version)} was not fetched; the node retries. {trouble.sentence}"
            self._parts.troubles.begin(_fetch_of(version), replace(trouble, sentence=what))
            unreadable = error.code == UNREADABLE
            await self._answer(FetchFailed(policy_version=version, what=error.what, unreadable=unreadable))
            return
        finally:
            self.fetching.pop(version, None)
        self._parts.troubles.end(_fetch_of(version))
        log.info("%s is here.", artefact_title(version))
        await self._answer(ArtefactReady(policy_version=version, fetched=fetched))
        if version is not None:
            await self._share(version, offer, fetched)

    async def _answer(self, answer: ArtefactReady | FetchFailed) -> None:
        self._answers[answer.policy_version] = answer
        await self._parts.inbox.put(answer)

    async def _share(self, version: int, offer: ArtefactOffer, fetched: Fetched) -> None:
        try:
            await self.fetcher.share(offer, fetched)
        except (RemoteProtocolError, SwarmError, StorageError) as error:
            log.warning("%s is not served to others: %s", artefact_title(version), error)

    def _file_job(self, version: int | None, job: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `job`, which changes an artefact's files, after all earlier jobs on these files. A job that is cancelled
        before its turn never runs.
        """
        files = self._files.setdefault(version, asyncio.Lock())

        async def run() -> None:
            async with files:  # The lock is fair: first come, first served.
                await job()

        return self._start(run(), name=f"files of {artefact_title(version)}")

    def _start(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for version, fetch in list(self._fetches.items()):
            if fetch is task:
                del self._fetches[version]
        if not task.cancelled() and task.exception() is not None:
            self.failure = self.failure or task.exception()


def artefact_title(version: int | None) -> str:
    return "The base model" if version is None else f"Policy version {version}"


def _engine_of(device: str) -> str:
    """Return the name under which the node's troubles (reported problems) list the engine of this device."""
    return f"{_ENGINE} of {device}" if device else _ENGINE


def _fetch_of(version: int | None) -> str:
    """Return the name under which the node's troubles (reported problems) list the fetch of this version."""
    return f"the fetch of {artefact_title(version)}"
