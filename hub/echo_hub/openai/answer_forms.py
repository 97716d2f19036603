"""The answers of the three endpoints, as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from echo_hub.openai.growing_reply import GrowingReply, ReplyNews
from echo_hub.openai.options import SamplingOptions
from echo_hub.openai.prompts import ReadPrompt
from echo_hub.openai.requests import ChatRequest, CompletionRequest, GenerateRequest
from echo_hub.openai.token_texts import TokenTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """Fields that all answers to one request have in common."""

    answer_id: str
    created: int
    model: str
    """Exact name of the weights, for example `run@12`."""
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class AnswerForm(Protocol):
    """Builds the answers of one endpoint to one request."""

    reads_calls: bool
    """True if tool calls in the completions are to be parsed."""

    def whole(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        """Return the answer with all completions."""


class StreamForm(AnswerForm, Protocol):
    """Builds the chunks of a streamed answer."""

    def opening(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> list[dict[str, Any]]:
        """Return the chunks with which a stream begins."""

    def chunk(self, head: AnswerHead, reply: GrowingReply, news: ReplyNews) -> dict[str, Any]:
        """Return the chunk for new tokens of a completion."""

    def closing(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        """Return the last chunk, which has the token usage and no completion."""


class ChatForm:
    """Answers of `/v1/chat/completions`."""

    def __init__(self, request: ChatRequest, prompt: ReadPrompt, texts: TokenTexts) -> None:
        self.reads_calls = request.reads_calls
        self._request = request
        self._prompt = prompt
        self._texts = texts

    def whole(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        choices = []
        for reply in replies:
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if reply.calls:
                message["content"] = reply.text.strip() or None
                message["tool_calls"] = [call.body() for call in reply.calls]
            choices.append(self._choice(reply.number, reply.ids, reply.logprobs, reply.finish) | {"message": message})
        return {
            **head.fields("chat.completion"),
            "choices": choices,
            "usage": _usage([self._prompt], replies),
            **self._prompt_ids(),
        }

    def opening(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> list[dict[str, Any]]:
        return [
            self._chunk(head, [self._delta(reply.number, {"role": "assistant", "content": ""})]) | self._prompt_ids()
            for reply in replies
        ]

    def chunk(self, head: AnswerHead, reply: GrowingReply, news: ReplyNews) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": news.text} if news.text else {}
        if news.calls:
            delta["tool_calls"] = [{"index": place, **call.body()} for place, call in enumerate(news.calls)]
        choice = self._choice(reply.number, news.ids, news.logprobs, news.finish or None)
        return self._chunk(head, [choice | {"delta": delta}])

    def closing(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        return self._chunk(head, []) | {"usage": _usage([self._prompt], replies)}

    def _choice(self, number: int, ids: Sequence[int], logprobs: Sequence[float], finish: str | None) -> dict[str, Any]:
        request = self._request
        told = None
        if request.logprobs:
            told = self._texts.chat_logprobs(ids, logprobs, as_ids=request.return_tokens_as_token_ids)
        token_ids = {"token_ids": list(ids)} if request.return_token_ids else {}
        return {"index": number, "logprobs": told, "finish_reason": finish, **token_ids}

    def _delta(self, number: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, head: AnswerHead, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._request.stream_options.include_usage else {}
        return {**head.fields("chat.completion.chunk"), "choices": choices, **usage}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt.ids.tolist()} if self._request.return_token_ids else {}


class CompletionForm:
    """Answers of `/v1/completions`. Completions come in the order of their prompts."""

    reads_calls = False

    def __init__(self, request: CompletionRequest, prompts: Sequence[ReadPrompt], texts: TokenTexts) -> None:
        self._request = request
        self._prompts = prompts
        self._texts = texts
        self._offsets: dict[int, int] = {}
        """For each completion of a stream: length of the text of all tokens that were sent so far."""

    def whole(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        choices = [
            self._choice(reply, reply.text, reply.ids, reply.logprobs, reply.finish) | self._prompt_ids(reply)
            for reply in replies
        ]
        return {**head.fields("text_completion"), "choices": choices, "usage": _usage(self._prompts, replies)}

    def opening(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> list[dict[str, Any]]:
        if not self._request.return_token_ids:
            return []
        return [
            self._chunk(head, [self._choice(reply, "", [], [], None) | self._prompt_ids(reply)]) for reply in replies
        ]

    def chunk(self, head: AnswerHead, reply: GrowingReply, news: ReplyNews) -> dict[str, Any]:
        choice = self._choice(reply, news.text, news.ids, news.logprobs, news.finish or None)
        return self._chunk(head, [choice])

    def closing(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        return self._chunk(head, []) | {"usage": _usage(self._prompts, replies)}

    def _choice(
        self, reply: GrowingReply, text: str, ids: Sequence[int], logprobs: Sequence[float], finish: str | None
    ) -> dict[str, Any]:
        request = self._request
        told = None
        if request.logprobs is not None:
            offset = self._offsets.get(reply.number, 0)
            told = self._texts.completion_logprobs(
                ids, logprobs, as_ids=request.return_tokens_as_token_ids, offset=offset
            )
            self._offsets[reply.number] = offset + self._texts.length(ids)
        token_ids = {"token_ids": list(ids)} if request.return_token_ids else {}
        return {"index": reply.number, "text": text, "logprobs": told, "finish_reason": finish, **token_ids}

    def _chunk(self, head: AnswerHead, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._request.stream_options.include_usage else {}
        return {**head.fields("text_completion"), "choices": choices, **usage}

    def _prompt_ids(self, reply: GrowingReply) -> dict[str, Any]:
        ids = self._prompts[reply.prompt].ids
        return {"prompt_token_ids": ids.tolist()} if self._request.return_token_ids else {}


class GenerateForm:
    """Answers of `/inference/v1/generate`, which has no stream. The answer has token ids, always with their
    log-probabilities."""

    reads_calls = False

    def __init__(self, request: GenerateRequest, prompt: ReadPrompt, texts: TokenTexts) -> None:
        self._request = request
        self._prompt = prompt
        self._texts = texts

    def whole(self, head: AnswerHead, replies: Sequence[GrowingReply]) -> dict[str, Any]:
        return {
            "request_id": self._request.request_id or head.answer_id,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": [
                {
                    "index": reply.number,
                    "token_ids": reply.ids,
                    "logprobs": self._texts.chat_logprobs(reply.ids, reply.logprobs, as_ids=True),
                    "finish_reason": reply.finish,
                }
                for reply in replies
            ],
            "prompt_token_ids": self._prompt.ids.tolist(),
            "usage": _usage([self._prompt], replies),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AskedCompletions:
    """A request that was read and checked."""

    options: SamplingOptions
    prompts: Sequence[ReadPrompt]
    form: AnswerForm
    stream: StreamForm | None = None
    """None = answer with one object."""


def _usage(prompts: Sequence[ReadPrompt], replies: Sequence[GrowingReply]) -> dict[str, int]:
    asked, drawn = sum(len(prompt.ids) for prompt in prompts), sum(len(reply.ids) for reply in replies)
    return {"prompt_tokens": asked, "completion_tokens": drawn, "total_tokens": asked + drawn}
