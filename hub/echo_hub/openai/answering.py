"""Answer a request: draw the completions, then send a JSON object or stream chunks.

When the client disconnects, drawing is cancelled within a second or at the next write.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from aiohttp import hdrs, web

from echo_hub.openai.answer_forms import AnswerHead, AskedCompletions, StreamForm
from echo_hub.openai.drawn_replies import DrawnReplies, DrawnState, PromptWish, ReplyTokens
from echo_hub.openai.error_answers import FAILED, error_body
from echo_hub.openai.event_stream import ChunkStream
from echo_hub.openai.growing_reply import GrowingReply, reply_text
from echo_hub.openai.prompts import PromptEncoder
from echo_hub.openai.reply_calls import ReplyCalls
from echo_hub.run.base_model import PromptCodec
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.service import TenantService

log = logging.getLogger(__name__)

HEAD_S: Final = 5.0
"""Longest time in seconds that a stream waits for its first tokens before it sends the response head. A refusal that
comes before the head gets its own HTTP status."""
COMMENT_S: Final = 15.0
"""Seconds between comments in an idle stream."""
NOT_READY_S: Final = 30.0
"""Longest time in seconds to wait for first tokens while nothing can draw, for example because no node is connected."""
LOOK_S: Final = 1.0
"""Seconds between two checks for a disconnected client."""
_GONE: Final = 499
"""Status for disconnected clients, as web servers log it."""
_LARGE: Final = 10_000
"""Threads serialise answers with at least this number of tokens, so the event loop stays free."""


class CompletionAnswers:
    """Draws the completions of requests and sends the answers. `fingerprint` identifies the base model's files."""

    def __init__(self, service: TenantService, codec: PromptCodec, encoder: PromptEncoder, *, fingerprint: str) -> None:
        self._service = service
        self._codec = codec
        self._encoder = encoder
        self._fingerprint = fingerprint

    async def answer(
        self, request: web.Request, tenant_id: str, asked: AskedCompletions, stream: ChunkStream
    ) -> web.StreamResponse:
        """Answer a request. Raises Refusal if the head of `stream` was not sent yet; otherwise the refusal is the
        stream's last event."""
        model = await self._service.resolve(tenant_id, asked.options.model)
        head = AnswerHead(
            answer_id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=model,
            fingerprint=f"{model}+{self._fingerprint}",
        )
        drawn = DrawnReplies(
            self._service,
            tenant_id,
            model=model,
            wishes=[
                PromptWish(prompt_ids=prompt.ids, wish=asked.options.wish(room=prompt.room)) for prompt in asked.prompts
            ],
            in_pieces=asked.stream is not None,
        )
        replies = self._new_replies(asked)
        if asked.stream is None:
            return await _unless_gone(request, self._whole(drawn, head, asked, replies))
        return await self._streamed(
            drawn, head, asked.stream, asked.options.stream_options.include_usage, replies, stream
        )

    def _new_replies(self, asked: AskedCompletions) -> list[GrowingReply]:
        """Return empty completions, in the order of their prompts."""
        options, found = asked.options, list[GrowingReply]()
        for number, prompt in enumerate(asked.prompts):
            in_thought = asked.form.reads_calls and self._encoder.leaves_thought_open(prompt.ids)
            for _ in range(options.n):
                text = reply_text(self._codec, options, end_ids=self._codec.stop_ids)
                calls = ReplyCalls(in_thought=in_thought) if asked.form.reads_calls else None
                found.append(GrowingReply(len(found), number, text, calls))
        return found

    async def _whole(
        self, drawn: DrawnReplies, head: AnswerHead, asked: AskedCompletions, replies: Sequence[GrowingReply]
    ) -> web.Response:
        began = time.monotonic()
        async with drawn:
            while (tokens := await drawn.next(within_s=LOOK_S)) is not DrawnState.ENDED:
                if isinstance(tokens, ReplyTokens):
                    replies[tokens.prompt * asked.options.n + tokens.index].add(tokens)
                else:
                    self._check_ready(drawn, began)
        if sum(len(reply.ids) for reply in replies) < _LARGE:
            body = _body(asked, head, replies)
        else:
            body = await asyncio.to_thread(_body, asked, head, replies)
        return web.Response(body=body, content_type="application/json", headers={hdrs.CACHE_CONTROL: "no-store"})

    async def _streamed(
        self,
        drawn: DrawnReplies,
        head: AnswerHead,
        form: StreamForm,
        has_usage: bool,
        replies: Sequence[GrowingReply],
        stream: ChunkStream,
    ) -> web.StreamResponse:
        per_prompt, began = len(replies) // (replies[-1].prompt + 1), time.monotonic()
        async with drawn:
            try:
                tokens = await drawn.next(within_s=HEAD_S)
                await stream.open()
                for chunk in form.opening(head, replies):
                    await stream.send(chunk)
                while tokens is not DrawnState.ENDED:
                    if isinstance(tokens, ReplyTokens):
                        reply = replies[tokens.prompt * per_prompt + tokens.index]
                        await stream.send(form.chunk(head, reply, reply.add(tokens)))
                    else:
                        self._check_ready(drawn, began)
                        await stream.comment(self._service.waiting_reason() or "waiting")
                    tokens = await drawn.next(within_s=COMMENT_S)
                if has_usage:
                    await stream.send(form.closing(head, replies))
                await stream.end()
            except ConnectionError:
                log.debug("a client left its stream")
            except Refusal as refusal:
                if not stream.is_open:
                    raise
                await end_with_error(stream, refusal)
        return stream.response

    def _check_ready(self, drawn: DrawnReplies, began: float) -> None:
        """Raise Refusal if the request has waited `NOT_READY_S` for first tokens and nothing draws now."""
        reason = self._service.waiting_reason()
        if reason and not drawn.has_begun and time.monotonic() - began >= NOT_READY_S:
            raise Refusal(RefusalKind.NOT_READY, reason, do="Send the request again later.")


async def end_with_error(stream: ChunkStream, error: Exception) -> None:
    """Send an error as the last event of a stream whose head was sent."""
    try:
        await stream.send(error_body(error) if isinstance(error, Refusal) else FAILED)
    except ConnectionError:
        log.debug("a client left its stream before an error")


async def _unless_gone(request: web.Request, work: Coroutine[Any, Any, web.Response]) -> web.Response:
    """Await an answer; cancel it if the client disconnects."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
            if request.transport is None or request.transport.is_closing():
                return web.Response(status=_GONE)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _body(asked: AskedCompletions, head: AnswerHead, replies: Sequence[GrowingReply]) -> bytes:
    return json.dumps(asked.form.whole(head, replies), allow_nan=False, separators=(",", ":")).encode()
