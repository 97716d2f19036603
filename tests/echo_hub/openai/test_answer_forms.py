"""Tool calls in answers, read by the types of OpenAI's package."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from echo_hub.openai.answer_forms import AnswerHead, ChatForm
from echo_hub.openai.drawn_replies import ReplyTokens
from echo_hub.openai.growing_reply import GrowingReply, reply_text
from echo_hub.openai.prompts import ReadPrompt
from echo_hub.openai.reply_calls import ReplyCalls
from echo_hub.openai.requests import ChatRequest
from echo_hub.openai.token_texts import TokenTexts
from tests.echo_hub.openai.test_prompts import TOOL, codec_of

CALLS = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)
HEAD = AnswerHead(answer_id="x", created=1, model="run@1", fingerprint="run@1+ab")


def told(text: str, finish: str = "stop", **options: Any) -> tuple[ChatCompletion, list[ChatCompletionChunk]]:
    """Return the answer and the chunks for a model that replies with `text`, three tokens at a time."""
    codec = codec_of()
    request = ChatRequest.read({"model": "run", "messages": [{"role": "user", "content": "a"}], **options})
    form = ChatForm(request, ReadPrompt(ids=np.array([1, 2], np.int32), room=9), TokenTexts(codec))
    calls = ReplyCalls() if form.reads_calls else None
    reply = GrowingReply(0, 0, reply_text(codec, request, end_ids=codec.stop_ids), calls)
    ids = [*codec.ids_of_plain(text), *(codec.stop_ids if finish == "stop" else ())]
    chunks = form.opening(HEAD, [reply])
    for place in range(0, len(ids), 3):
        part = np.array(ids[place : place + 3], np.int32)
        ends = finish if place + 3 >= len(ids) else ""
        tokens = ReplyTokens(prompt=0, index=0, ids=part, logprobs=np.full(len(part), -0.5, np.float32), finish=ends)
        chunks.append(form.chunk(HEAD, reply, reply.add(tokens)))
    assert reply.ids == ids
    whole = ChatCompletion.model_validate(form.whole(HEAD, [reply]))
    return whole, [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]


def test_calls_are_answered_as_calls() -> None:
    whole, chunks = told(CALLS, tools=[TOOL])
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    assert choice.message.tool_calls is not None
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 1}, {"a": 2}]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id) for call in streamed] == [
        (number, call.id) for number, call in enumerate(choice.message.tool_calls)
    ]
    assert [call.function.name for call in streamed] == ["add", "add"] and deltas[-1].tool_calls
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("options", "text", "finish"),
    [
        ({}, CALLS, "stop"),
        ({"tools": [TOOL], "tool_choice": "none"}, CALLS, "stop"),
        ({"tools": [TOOL]}, CALLS[:-5], "length"),
        ({"tools": [TOOL]}, "No call.", "stop"),
    ],
)
def test_other_replies_are_answered_as_text(options: dict[str, Any], text: str, finish: str) -> None:
    whole, chunks = told(text, finish, **options)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (text, finish, None)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == finish


def test_complete_calls_of_a_reply_that_was_cut_off_are_kept() -> None:
    whole, _ = told(f"{CALLS}\n", "length", tools=[TOOL])
    assert whole.choices[0].finish_reason == "length" and len(whole.choices[0].message.tool_calls or ()) == 2
