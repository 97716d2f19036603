"""Draw the completions of all prompts of one request at once.

    async with DrawnReplies(service, ...) as drawn:
        while (tokens := await drawn.next(within_s=15.0)) is not ENDED: ...

Leaving the context cancels what is still being drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.drawing import DrawnPiece
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Sample, SampleResult, SamplingWish
from echo_hub.tenants.service import TenantService

_QUEUED: Final = 64
"""Maximum number of queued pieces. A full queue pauses drawing until the client reads."""


class DrawnState(Enum):
    ENDED = "ended"
    """All completions are finished."""
    WAITING = "waiting"
    """No new tokens were drawn within the time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyTokens:
    """New tokens of one completion."""

    prompt: int
    """Number of the prompt in the request, from 0."""
    index: int
    """Number of the completion among those of its prompt, from 0."""
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: str = ""
    """`stop` or `length` with the last tokens of the completion; "" before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptWish:
    prompt_ids: NDArray[np.int32]
    wish: SamplingWish


class DrawnReplies:
    """Completions of one request. `in_pieces`: give unfinished completions too, as they grow."""

    def __init__(
        self, service: TenantService, tenant_id: str, *, model: str, wishes: Sequence[PromptWish], in_pieces: bool
    ) -> None:
        self._service = service
        self._tenant_id = tenant_id
        self._model = model
        self._wishes = wishes
        self._in_pieces = in_pieces
        self._queue: asyncio.Queue[ReplyTokens | BaseException | None] = asyncio.Queue(_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = 0
        self.has_begun = False
        """True after the first tokens of any completion."""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._draw(number)) for number in range(len(self._wishes))]
        self._num_running = len(self._tasks)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, *, within_s: float | None = None) -> ReplyTokens | DrawnState:
        """Return the next tokens of any completion. Raises Refusal if one of them cannot be drawn."""
        while self._num_running:
            try:
                async with asyncio.timeout(within_s):
                    item = await self._queue.get()
            except TimeoutError:
                return DrawnState.WAITING
            match item:
                case None:
                    self._num_running -= 1
                case ReplyTokens():
                    return item
                case error:
                    raise error
        return DrawnState.ENDED

    async def _draw(self, number: int) -> None:
        """Queue the completions of one prompt, then None. If drawing fails, queue the error last."""
        try:
            await self._draw_prompt(number)
        except Exception as error:  # noqa: BLE001 - `next` raises it.
            await self._queue.put(error)
        else:
            await self._queue.put(None)

    async def _draw_prompt(self, number: int) -> None:
        asked = self._wishes[number]
        drawn = self._service.sample_at_once(
            self._tenant_id, model=self._model, prompt_ids=asked.prompt_ids, wish=asked.wish
        )
        replies = [_Progress(number, index) for index in range(asked.wish.num_samples)]
        async with aclosing(drawn):  # type: ignore[type-var]
            async for item in drawn:
                self.has_begun = True
                news: list[ReplyTokens | None]
                match item:
                    case DrawnPiece():
                        news = [replies[item.index].add(item)] if self._in_pieces else []
                    case Sample():
                        news = [replies[item.index].finish(item)]
                    case SampleResult():
                        news = [one.finish(sample) for one, sample in zip(replies, item.samples, strict=True)]
                for tokens in news:
                    if tokens is not None:
                        await self._queue.put(tokens)


class _Progress:
    """Tokens of one completion that the client has already received."""

    def __init__(self, prompt: int, index: int) -> None:
        self._prompt = prompt
        self._index = index
        self._ids = np.zeros(0, dtype=np.int32)
        self._is_finished = False

    def add(self, piece: DrawnPiece) -> ReplyTokens | None:
        """Return the new tokens of a piece, or None. A piece that does not follow directly is left out: the finished
        sample will have all tokens."""
        known = len(self._ids) - piece.start
        if self._is_finished or known < 0 or known >= len(piece.token_ids):
            return None
        self._ids = np.concatenate([self._ids, piece.token_ids[known:]])
        return self._tokens(piece.token_ids[known:], piece.logprobs[known:])

    def finish(self, sample: Sample) -> ReplyTokens | None:
        """Return the rest of the finished completion. Raises Refusal if it does not continue the earlier pieces."""
        if self._is_finished:
            return None
        known = len(self._ids)
        if not np.array_equal(sample.token_ids[:known], self._ids):
            raise Refusal(
                RefusalKind.NOT_READY,
                "A node sent a wrong part of this completion, so the stream cannot continue.",
                do="Send the request again, without stream or with checked.",
            )
        self._is_finished = True
        return self._tokens(sample.token_ids[known:], sample.logprobs[known:], sample.finish)

    def _tokens(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32], finish: str = "") -> ReplyTokens:
        return ReplyTokens(prompt=self._prompt, index=self._index, ids=ids, logprobs=logprobs, finish=finish)
