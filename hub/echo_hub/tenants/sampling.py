"""Sample requests from their commit to their outcome: fair turns, prompt log-probabilities, the drawer, the outcome.

Each request is a task. While many wait, their prompts and parameters are only in the database, so they take little
memory. A restarted hub begins all unfinished requests again, with the same seeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Final

import numpy as np

from echo_hub.store.tenant_reading import find_request_by_id
from echo_hub.store.tenant_records import TenantTallied
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.outcomes import Failed, Outcome
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import PromptLogprobs, Sample, SampleResult
from echo_hub.tenants.stored import SampleWork, unpack_stored
from echo_hub.tenants.turns_to_draw import TurnsToDraw
from echo_shared.errors import EchoError
from echo_shared.process.child import ChildExited

log = logging.getLogger(__name__)

AT_HAND: Final = 512
"""Number of waiting requests whose prompts and parameters are kept in memory. Those of other requests are read again
from the database."""
LOOK_S: Final = 1.0
"""Seconds between two checks of how many samples the drawer can draw."""
DEATHS: Final = 3
"""Number of times in a row that the process may die while it computes a request's prompt. Then the request fails."""
DAY_S: Final = 86_400
_FIRST_GUESS: Final = 128.0
"""Number of tokens that a tenant's first completion is expected to have."""
_MEMORY: Final = 0.9
"""Weight of the old value when a new completion updates a tenant's mean completion length."""

_Drawn = asyncio.Queue[DrawnPiece | Sample | SampleResult | Exception]
"""Pieces and samples of a request as they are drawn, and last its result or an error."""


class TenantSampling:
    """All sample requests that are not finished: waits for turns, draws, and commits outcomes."""

    def __init__(self, core: TenantCore) -> None:
        self._drawer = core.drawer
        self._adapters = core.adapters
        self._host = core.host
        self._scorer = core.scorer
        self._futures = core.futures
        self._quotas = core.quotas
        self._store = core.store
        self._writer = core.writer
        self._turns = TurnsToDraw(core.drawer.width())
        self._lengths: dict[str, float] = {}
        """Mean length of each tenant's newest completions."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, str] = {}
        """The tenant of each unfinished request."""
        self._stopped: set[str] = set()
        """Requests whose drawing is being stopped for the client or the operator."""
        self._group: asyncio.TaskGroup | None = None
        self._early: list[tuple[str, str, SampleWork, float]] = []
        """Requests that arrived before `run` started."""

    async def run(self) -> None:
        """Draw requests until cancelled. Requests that arrived before this call are started here."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for request_id, tenant_id, work, cost in self._early:
                self._begin(group, request_id, tenant_id, work, cost)
            self._early.clear()
            while True:
                self._turns.change(self._drawer.width())
                await asyncio.sleep(LOOK_S)

    def arrive(self, request_id: str, tenant_id: str, work: SampleWork, cost: float) -> None:
        """Start to draw a request that is committed."""
        self._adapters.hold(work.policy_version, request_id)
        if self._group is None:
            self._early.append((request_id, tenant_id, work, cost))
        else:
            self._begin(self._group, request_id, tenant_id, work, cost)

    def _begin(self, group: asyncio.TaskGroup, request_id: str, tenant_id: str, work: SampleWork, cost: float) -> None:
        at_hand = work if len(self._tasks) < AT_HAND else None
        turn = self._turns.turn(
            tenant_id, request_id, cost, num_samples=work.wish.num_samples, twins=_twins(tenant_id, work)
        )
        task = group.create_task(
            self._draw_stored(request_id, tenant_id, at_hand, cost, turn), name=f"draw-{request_id}"
        )
        self._tasks[request_id], self._tenants[request_id] = task, tenant_id
        policy_version = work.policy_version
        task.add_done_callback(lambda task: self._ended(request_id, policy_version, task))

    def _ended(self, request_id: str, policy_version: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request_id, None)
        self._tenants.pop(request_id, None)
        if not task.cancelled() or request_id in self._stopped:  # Otherwise the hub stops. The next start needs it.
            self._adapters.release(policy_version, request_id)

    def expected_tokens(self, tenant_id: str, prompt_tokens: int, num_samples: int, max_tokens: int) -> float:
        """Return how many tokens a request will probably cost."""
        mean = self._lengths.get(tenant_id, _FIRST_GUESS)
        return prompt_tokens + num_samples * min(mean, max_tokens)

    def reason(self) -> str:
        """Return why samples wait, in one sentence; "" = they are drawn."""
        return self._drawer.state()

    def tenants(self) -> set[str]:
        """Return the tenants with unfinished requests."""
        return set(self._tenants.values())

    async def cancel_all(self, tenant_id: str, why: str) -> None:
        """Stop drawing all requests of a tenant."""
        for request_id in [one for one, tenant in self._tenants.items() if tenant == tenant_id]:
            await self.cancel(request_id, why)

    async def cancel(self, request_id: str, why: str = "The client has cancelled the request.") -> None:
        """Stop drawing a request. Its outcome is that it failed."""
        await self.stop(request_id)
        if self._futures.is_unfinished(request_id):
            await self._futures.end(request_id, Failed(error=why, category="user"))

    async def stop(self, request_id: str) -> None:
        """Stop drawing a request whose outcome no client will ask for."""
        task = self._tasks.get(request_id)
        if task is not None:
            self._stopped.add(request_id)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._stopped.discard(request_id)

    async def draw_at_once(self, job: DrawJob, work: SampleWork) -> AsyncGenerator[DrawnPiece | Sample | SampleResult]:
        """Draw a request that is not in the database. Raises Refusal and other EchoErrors.

        A caller that takes the pieces slowly does not slow the drawing down, so it does not occupy a turn for long.
        """
        drawn: _Drawn = asyncio.Queue()
        drawing = asyncio.create_task(self._draw_into(drawn, job, work), name=f"draw-{job.request_id}")
        try:
            while True:
                item = await drawn.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, SampleResult):
                    return
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    async def _draw_into(self, drawn: _Drawn, job: DrawJob, work: SampleWork) -> None:
        """Queue the request's pieces and samples, and last its result or the error that ended the drawing. The drawn
        tokens count for the tenant, also if the client disconnects before the end."""
        cost = self.expected_tokens(job.tenant_id, len(job.prompt_ids), len(job.sequence_ids), job.max_tokens)
        self._adapters.hold(job.policy_version, job.request_id)
        lengths: dict[int, int] = {}
        last: SampleResult | Exception
        is_whole = False
        try:
            try:
                num_samples, twins = len(job.sequence_ids), _twins(job.tenant_id, work)
                async with self._turns.turn(job.tenant_id, job.request_id, cost, num_samples=num_samples, twins=twins):
                    last = await self._drawn(job, work, lengths, drawn)
                    is_whole = True
            finally:
                if lengths:
                    tally = _tally(job.tenant_id, len(job.prompt_ids), sum(lengths.values()))
                    self._quotas.end(job.request_id, tally.tokens, now=time.time())
                    saved = cost - tally.tokens
                    self._turns.settle(job.tenant_id, saved if is_whole else min(0.0, saved))
                    await self._writer.commit(tally)
        except Exception as error:  # noqa: BLE001 - `draw_at_once` raises it.
            last = error
        finally:
            self._adapters.release(job.policy_version, job.request_id)
        drawn.put_nowait(last)

    async def _drawn(
        self, job: DrawJob, work: SampleWork, lengths: dict[int, int], drawn: _Drawn | None = None
    ) -> SampleResult:
        """Wait for the request's turn, and draw it. `drawn` gets the pieces and samples as they come, `lengths` the
        number of tokens of each sample so far."""
        prompt = await self._prompt_logprobs(work)
        await self._adapters.ready(job.policy_version)
        samples: dict[int, Sample] = {}
        async with aclosing(_generator(self._drawer.draw(job))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Sample):
                    piece = replace(piece, index=job.sequence_ids.index(piece.sequence_id))
                    samples[piece.index] = piece
                    lengths[piece.index] = len(piece.token_ids)
                else:
                    lengths[piece.index] = piece.start + len(piece.token_ids)
                if drawn is not None:
                    drawn.put_nowait(piece)
        for length in lengths.values():
            mean = self._lengths.get(job.tenant_id, float(length))
            self._lengths[job.tenant_id] = _MEMORY * mean + (1.0 - _MEMORY) * length
        return _result(samples, prompt, job)

    async def _draw_stored(
        self,
        request_id: str,
        tenant_id: str,
        at_hand: SampleWork | None,
        cost: float,
        turn: AbstractAsyncContextManager[None],
    ) -> None:
        """Wait for the request's turn, and draw it. `at_hand` None: read its prompt and parameters from the
        database."""
        async with turn:
            work = at_hand or await self._stored(request_id)
            if work is None:
                return  # The request's session has ended.
            outcome = await self._outcome(request_id, tenant_id, work)
        tally = []
        if isinstance(outcome, SampleResult):
            num_drawn = sum(len(sample.token_ids) for sample in outcome.samples)
            tally.append(_tally(tenant_id, len(work.prompt_ids), num_drawn))
        self._turns.settle(tenant_id, cost - sum(record.tokens for record in tally))
        await self._futures.end(request_id, outcome, *tally)

    async def _stored(self, request_id: str) -> SampleWork | None:
        row = await self._store.read(find_request_by_id, request_id)
        return None if row is None or row.body is None else unpack_stored(row.body, SampleWork)

    async def _outcome(self, request_id: str, tenant_id: str, work: SampleWork) -> Outcome:
        try:
            return await self._drawn(job_of(request_id, tenant_id, work), work, {})
        except Refusal as error:
            return Failed(error=str(error), category="user")
        except (EchoError, ChildExited) as error:
            log.warning("request %s of %s failed: %s", request_id, tenant_id, error)
            return Failed(error=str(error), category="server")
        except Exception as error:
            log.exception("request %s of %s failed", request_id, tenant_id)
            return Failed(error=f"The hub failed: {error!r}", category="unknown")

    async def _prompt_logprobs(self, work: SampleWork) -> PromptLogprobs | None:
        wish = work.wish
        if not wish.prompt_logprobs and not wish.topk_prompt_logprobs:
            return None
        if self._scorer is not None and not wish.topk_prompt_logprobs:
            found = await self._scorer.logprobs(work.prompt_ids, work.policy_version)
            if found is not None:
                return PromptLogprobs(logprobs=np.concatenate([[np.float32(np.nan)], found]))
        adapter = self._adapters.path(work.policy_version)
        for attempt in range(DEATHS):
            computer = await self._host.get()
            try:
                return await computer.prompt_logprobs(work.prompt_ids, adapter, top_k=wish.topk_prompt_logprobs)
            except ChildExited:
                await self._host.lost(computer)
                if attempt == DEATHS - 1:
                    raise
        raise AssertionError("unreachable")


def _tally(tenant_id: str, prompt_tokens: int, drawn_tokens: int) -> TenantTallied:
    day = int(time.time() // DAY_S)
    return TenantTallied(
        tenant_id=tenant_id, day=day, requests=1, prompt_tokens=prompt_tokens, drawn_tokens=drawn_tokens
    )


def _twins(tenant_id: str, work: SampleWork) -> Hashable | None:
    """Return a key that a tenant's equal requests without a seed share, so that they can be drawn together; None for a
    request with a seed."""
    return None if work.wish.seed is not None else (tenant_id, work.seed)


def job_of(request_id: str, tenant_id: str, work: SampleWork) -> DrawJob:
    wish = work.wish
    assert wish.max_tokens is not None and wish.stop_ids is not None, "sampling_limits.complete has filled them in"
    return DrawJob(
        request_id=request_id,
        tenant_id=tenant_id,
        prompt_ids=work.prompt_ids,
        sequence_ids=work.sequence_ids,
        policy_version=work.policy_version,
        temperature=wish.temperature,
        max_tokens=wish.max_tokens,
        stop_ids=tuple(sorted(wish.stop_ids)),
        stop_strings=wish.stop_strings,
        seed=work.seed,
        first_index=work.first_index,
        joins=wish.seed is None,
        checked=wish.checked,
    )


async def _generator(pieces: AsyncIterator[DrawnPiece | Sample]) -> AsyncGenerator[DrawnPiece | Sample]:
    """Yield a drawer's pieces. Closing this generator closes the drawer's generator too."""
    try:
        async for piece in pieces:
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()


def _result(samples: dict[int, Sample], prompt: PromptLogprobs | None, job: DrawJob) -> SampleResult:
    if len(samples) != len(job.sequence_ids):
        raise EchoError(
            "The drawer ended before it had drawn all samples.",
            got=f"{len(samples)} of {len(job.sequence_ids)}",
            do="Ask again.",
        )
    ordered = tuple(samples[index] for index in range(len(samples)))
    return SampleResult(samples=ordered, prompt_logprobs=prompt, policy_version=job.policy_version)
