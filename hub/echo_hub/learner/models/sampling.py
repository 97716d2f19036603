"""The hub's own sampling for tenants: jobs of one adapter share a continuous batch, drawn as nodes draw.

Each adapter with jobs has its own batch. At most `MOST_BATCHES` batches exist at a time, and each may use an equal
share of the memory for keys and values. Batches take turns, one step each, by `FairTurns`. While other adapters wait, a
batch that has worked for `QUANTUM_S` seconds takes no more jobs: it ends with its last completion.

A stop string ends a completion with the token that completes it: `echo_hub.scoring.stop_strings`. After each step, only
the newest tokens are searched; a completion that may hold a stop string is then decided as a whole.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from echo_hub.learner.drawing import LOGIT_BYTES, MOST_ROWS
from echo_hub.learner.models.adapters import AdapterSeat, LoraTensors
from echo_hub.learner.models.turns import FairTurns
from echo_hub.learner.policy import Policy
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.stop_strings import NO_STRINGS, StopStrings
from echo_shared.errors import BackendError, EchoError, LearnerError
from echo_shared.process.out_of_memory import ran_out
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_cache import RowBytes, row_bytes
from echo_shared.sampling.torch_draws import draw
from echo_shared.sampling.torch_sampler import Batch
from echo_shared.wire.messages import FinishReason

log = logging.getLogger(__name__)

MOST_BATCHES: Final = 4
CPU_ROWS: Final = 128
"""Largest number of completions in a batch on a CPU. Wider batches are no faster there, and their steps take longer."""
QUANTUM_S: Final = 10.0
"""Seconds of work after which a batch takes no more jobs, if other adapters wait."""
PIECES_S: Final = 0.25
"""Interval, in seconds, at which new tokens of unfinished samples are sent."""
GREEDY_TEMPERATURE: Final = 1e-9
"""Temperature used in place of 0. With it, every draw gives the likeliest token."""
_SPARE_TOKENS: Final = 8
_FULL_SEARCH: Final = 64
"""Interval, in tokens, at which a completion is searched as a whole. Tokens without text could hide a stop string from
the search of the newest tokens."""


@dataclass(slots=True, eq=False)
class _Growing:
    """Tokens of an unfinished sample that the batch has reported."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    told: int = 0
    """Number of tokens that were sent in pieces so far."""
    searched: int = 0
    """Number of tokens that were searched for stop strings so far."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One `sample` request in the process. `number` is unique, and is the request's lease_id."""

    number: int
    request: GroupRequest
    strings: tuple[str, ...]
    left: set[int] = field(default_factory=set)
    """Indices of the samples that are not finished."""
    growing: dict[int, _Growing] = field(default_factory=dict)
    """Tokens of the unfinished samples, by index."""

    def __post_init__(self) -> None:
        self.left = set(self.request.indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenPiece:
    """New tokens of an unfinished sample. If `finish` is set, the sample is finished, and the piece holds all of the
    sample's tokens.
    """

    number: int
    index: int
    start: int
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str = ""
    ends_job: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobFailure:
    number: int
    error: EchoError


class AdapterBatch:
    """The jobs of one adapter, and the batch that draws them."""

    def __init__(self, sampler: JobSampler, adapter: Path | None) -> None:
        self.adapter = adapter
        self.waiting: deque[Job] = deque()
        self.begun: dict[int, Job] = {}
        """Jobs that the batch has taken, by number."""
        self.closed = False
        """True if the batch takes no more jobs, because other adapters wait."""
        self.worked_s = 0.0
        self._sampler = sampler
        self._tensors: LoraTensors | None = None
        self._batch: Batch | None = None
        self._stream: Iterator[list[FinishedRollout]] = iter(())
        self._pieces_at = 0.0

    def __iter__(self) -> Iterator[GroupRequest]:
        return self

    def __next__(self) -> GroupRequest:
        """Give the sampler's batch the next job. The batch asks again later if there is none now."""
        if self.closed or not self.waiting:
            raise StopIteration
        job = self.waiting.popleft()
        self.begun[job.number] = job
        return job.request

    @property
    def is_live(self) -> bool:
        return self._batch is not None

    def begin(self) -> None:
        """Make the batch. Raises LearnerError if the adapter cannot be read."""
        self._tensors = self._sampler.tensors(self.adapter)
        self._batch = self._sampler.new_batch()
        self._stream = self._batch.sample(self)
        self.worked_s = 0.0

    def end(self) -> None:
        """Drop the batch and its tensors, to free their memory. A later `begin` may start again."""
        self._batch, self._tensors, self._stream, self.closed = None, None, iter(()), False

    def cancel(self, number: int) -> None:
        self.waiting = deque(job for job in self.waiting if job.number != number)
        if self.begun.pop(number, None) is not None and self._batch is not None:
            self._batch.cancel(number)

    def step(self) -> list[TokenPiece]:
        """Draw one token of each completion of the jobs in `begun`. Return new pieces and ends. End the batch if no job
        is left.
        """
        assert self._batch is not None
        started = time.perf_counter()
        finished = self._sampler.computed(self._tensors, self._stream)
        if finished is None:
            self.end()
            return []
        now = time.monotonic()
        due = now - self._pieces_at >= PIECES_S
        searches = any(job.strings for job in self.begun.values())
        if due or searches:
            self._grow(self._batch)
        pieces = [piece for rollout in finished for piece in self._finished(rollout)]
        if searches:
            pieces += self._stopped(self._batch)
        if due:
            self._pieces_at = now
            pieces += self._news()
        self.worked_s += time.perf_counter() - started
        return pieces

    def restart(self) -> None:
        """Draw all unfinished completions again, because the batch ran out of memory. The seeds give the same tokens.
        Pieces do not repeat tokens.
        """
        self.end()
        for job in reversed(self.begun.values()):
            job.request = replace(job.request, indices=tuple(sorted(job.left)))
            for growing in job.growing.values():
                growing.ids, growing.logprobs, growing.searched = [], [], 0
            self.waiting.appendleft(job)
        self.begun.clear()

    def fail(self, error: EchoError, *, waiting: bool) -> list[JobFailure]:
        """Drop all jobs in `begun`; with `waiting`, also drop the batch's waiting jobs. Return one failure for each
        dropped job.
        """
        jobs = [*self.begun.values(), *(self.waiting if waiting else ())]
        self.begun.clear()
        if waiting:
            self.waiting.clear()
        self.end()
        return [JobFailure(number=job.number, error=error) for job in jobs]

    def _grow(self, batch: Batch) -> None:
        for part in batch.news():
            growing = self.begun[part.lease_id].growing.setdefault(part.index, _Growing())
            growing.ids += part.ids.tolist()
            growing.logprobs += part.logprobs.tolist()

    def _finished(self, rollout: FinishedRollout) -> list[TokenPiece]:
        job = self.begun.get(rollout.lease_id)
        if job is None or rollout.index not in job.left:
            return []
        rollout = self._sampler.strings(job.strings).finished(rollout)
        ids, logprobs = rollout.completion_ids, rollout.behavior_logprobs
        return [self._ended(job, rollout.index, ids, logprobs, rollout.finish_reason.value)]

    def _stopped(self, batch: Batch) -> list[TokenPiece]:
        """End the completions that hold a stop string."""
        pieces = []
        for job in [job for job in self.begun.values() if job.strings]:
            strings = self._sampler.strings(job.strings)
            longest = max(len(string.encode()) for string in job.strings) + _SPARE_TOKENS
            for index, growing in list(job.growing.items()):
                new = len(growing.ids) - growing.searched
                if not new:
                    continue
                every = growing.searched // _FULL_SEARCH != len(growing.ids) // _FULL_SEARCH
                growing.searched = len(growing.ids)
                ids = np.array(growing.ids, dtype=np.int32)
                if strings.end(ids if every else ids[-longest - new :]) is None:
                    continue
                count = strings.end(ids)
                if count is not None:
                    batch.cancel(job.number, index)
                    logprobs = np.array(growing.logprobs[:count], dtype=np.float32)
                    pieces.append(self._ended(job, index, ids[:count], logprobs, FinishReason.STOP.value))
        return pieces

    def _ended(
        self, job: Job, index: int, ids: NDArray[np.int32], logprobs: NDArray[np.float32], finish: str
    ) -> TokenPiece:
        job.growing.pop(index, None)
        job.left.discard(index)
        if not job.left:
            del self.begun[job.number]
        return TokenPiece(
            number=job.number,
            index=index,
            start=0,
            ids=ids,
            logprobs=logprobs,
            finish=finish,
            ends_job=not job.left,
        )

    def _news(self) -> list[TokenPiece]:
        pieces = []
        for job in self.begun.values():
            for index, growing in job.growing.items():
                start, growing.told = growing.told, max(growing.told, len(growing.ids))
                if growing.told > start:
                    ids = np.array(growing.ids[start:], dtype=np.int32)
                    logprobs = np.array(growing.logprobs[start:], dtype=np.float32)
                    piece = TokenPiece(number=job.number, index=index, start=start, ids=ids, logprobs=logprobs)
                    pieces.append(piece)
        return pieces


class JobSampler:
    """All jobs, by adapter. `step` draws one token of each completion of one batch."""

    def __init__(self, policy: Policy, seat: AdapterSeat, *, base_dir: Path, kv_bytes: int) -> None:
        """`kv_bytes`: memory for keys and values of all batches."""
        self._policy = policy
        self._seat = seat
        self._base_dir = base_dir
        self._kv_bytes = kv_bytes
        self._row: RowBytes | None = None
        most = CPU_ROWS if policy.device.type == "cpu" else MOST_ROWS
        self._rows = max(1, min(most, LOGIT_BYTES // (8 * policy.vocab_size)))
        self._batches: dict[Path | None, AdapterBatch] = {}
        self._turns: FairTurns[Path | None] = FairTurns()
        self._read: dict[Path, LoraTensors] = {}
        self._codec: PromptCodec | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._batches)

    def add(self, job: Job, adapter: Path | None) -> None:
        if adapter not in self._batches:
            self._batches[adapter] = AdapterBatch(self, adapter)
        self._batches[adapter].waiting.append(job)

    def cancel(self, number: int) -> None:
        for batch in self._batches.values():
            batch.cancel(number)

    def step(self) -> list[TokenPiece | JobFailure]:
        """Do one step of the batch whose turn it is. Call this only if there is work."""
        found = self._begin()
        live = [batch.adapter for batch in self._batches.values() if batch.is_live]
        if not live:
            return found
        adapter = self._turns.next(live)
        batch = self._batches[adapter]
        started = time.perf_counter()
        try:
            found += batch.step()
        except BackendError as error:
            found += batch.fail(error, waiting=False)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            found += self._lower(batch, str(error) or type(error).__name__)
        self._turns.spent(adapter, time.perf_counter() - started)
        self._settle()
        return found

    def _begin(self) -> list[TokenPiece | JobFailure]:
        """Begin batches for waiting adapters if there is space. If there is none, close batches that have worked long
        enough.
        """
        found: list[TokenPiece | JobFailure] = []
        live = [batch for batch in self._batches.values() if batch.is_live]
        for batch in [batch for batch in self._batches.values() if not batch.is_live]:
            if len(live) == MOST_BATCHES:
                for other in live:
                    other.closed |= other.worked_s > QUANTUM_S
                break
            try:
                batch.begin()
                live.append(batch)
            except LearnerError as error:
                found += batch.fail(error, waiting=True)
        self._settle()
        return found

    def _settle(self) -> None:
        """Forget adapters without jobs. If an adapter's batch has ended but more of its jobs wait, the adapter goes
        to the end of the queue.
        """
        for adapter, batch in list(self._batches.items()):
            if not batch.begun and batch.is_live and (batch.closed or not batch.waiting):
                batch.end()
                del self._batches[adapter]
                if batch.waiting:
                    self._batches[adapter] = batch
            if not batch.begun and not batch.waiting:
                self._batches.pop(adapter, None)
                self._turns.forget(adapter)

    def _lower(self, batch: AdapterBatch, said: str) -> list[JobFailure]:
        width = min(self._rows, sum(len(job.left) for job in batch.begun.values()))
        if width <= 1:
            error = LearnerError(
                "The hub's device has too little memory for a single completion.",
                got=said,
                do="Ask for fewer tokens, or send a shorter prompt.",
            )
            failed = batch.fail(error, waiting=False)
        else:
            failed = []
            self._rows = width // 2
            batch.restart()
            log.warning("out of memory, sampling goes on with at most %d completions: %s", self._rows, said)
        gc.collect()
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()
        return failed

    def computed(
        self, tensors: LoraTensors | None, stream: Iterator[list[FinishedRollout]]
    ) -> list[FinishedRollout] | None:
        """Compute one step of a batch with the batch's adapter. Return its finished completions; None: the batch has no
        more work.
        """
        self._seat.hold(tensors)
        with self._policy.autocast():
            finished = next(stream, None)
        self._policy.computed()
        return finished

    def new_batch(self) -> Batch:
        if self._row is None:
            with self._policy.autocast():
                self._row = row_bytes(self._policy.model)
        cells = max(1, self._kv_bytes // (MOST_BATCHES * self._row.per_token))
        return Batch(
            self._policy.model,
            width=self._rows,
            max_cells=cells,
            state_cells=self._row.state_tokens,
            choose=draw,
        )

    def tensors(self, adapter: Path | None) -> LoraTensors | None:
        """Return an adapter's tensors. The most recent adapters stay in memory: a published directory never changes."""
        if adapter is None:
            return None
        found = self._read.pop(adapter, None) or self._seat.read(adapter)
        self._read[adapter] = found
        if len(self._read) > MOST_BATCHES:
            del self._read[next(iter(self._read))]
        return found

    def strings(self, strings: tuple[str, ...]) -> StopStrings:
        if not strings:
            return NO_STRINGS
        if self._codec is None:
            self._codec = PromptCodec.load(self._base_dir)
        return StopStrings(strings, self._codec)
