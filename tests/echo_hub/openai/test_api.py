"""OpenAI's own client against a real port that samples with the built-in base."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zlib
from typing import Any

import aiohttp
import openai
import pytest

from echo_hub.openai import answering, event_stream, request_body
from echo_hub.openai.request_body import MOST_BODY_BYTES
from echo_hub.tenants.refusal import Refusal, RefusalKind
from tests.echo_hub.openai.conftest import DEADLINE_S, OpenAiPort, token_of, until

ASK: Any = [{"role": "user", "content": "12+34="}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


async def test_a_conversation_is_answered(port: OpenAiPort) -> None:
    answer = await port.client.chat.completions.create(model="run", messages=ASK, max_tokens=8, seed=3)
    (choice,) = answer.choices
    codec = port.sampling.codec
    assert answer.model == "run@1" and choice.finish_reason in ("stop", "length")
    assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("run@1+")
    tenant, model, prompt_ids, wish = port.sampling.asked[0]
    assert (tenant, model, wish.seed, wish.max_tokens) == ("ada", "run@1", 3, 8)
    assert prompt_ids.tolist() == codec.encode_prompt("12+34=").tolist()
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt_ids)
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    again = await port.client.chat.completions.create(model="run@1", messages=ASK, max_tokens=8, seed=3)
    other = await port.client.chat.completions.create(model="base", messages=ASK, max_tokens=8, seed=3)
    assert again.choices == answer.choices and other.model == "base"


async def test_exact_ids_and_logprobs_come_with_the_text(port: OpenAiPort) -> None:
    answer = await port.client.chat.completions.create(
        model="run",
        messages=ASK,
        max_tokens=9,
        n=3,
        seed=5,
        temperature=2.0,
        logprobs=True,
        top_logprobs=0,
        extra_body={"return_token_ids": True},
    )
    codec, (_, _, prompt_ids, _) = port.sampling.codec, port.sampling.asked[0]
    assert answer.model_extra is not None and answer.model_extra["prompt_token_ids"] == prompt_ids.tolist()
    assert len({choice.message.content for choice in answer.choices}) == 3
    drawn = 0
    for number, choice in enumerate(answer.choices):
        assert choice.index == number and choice.logprobs is not None and choice.logprobs.content is not None
        ids = choice.model_extra["token_ids"]
        drawn += len(ids)
        assert choice.message.content == codec.decode(ids)
        assert [entry.token for entry in choice.logprobs.content] == [codec.text([one]) for one in ids]
        assert all(bytes(entry.bytes or []).decode() == entry.token for entry in choice.logprobs.content)
        assert all(entry.logprob < 0 and not entry.top_logprobs for entry in choice.logprobs.content)
        assert choice.finish_reason == ("stop" if ids[-1] in codec.stop_ids else "length")
    assert answer.usage is not None and answer.usage.completion_tokens == drawn


async def test_a_stream_adds_up_to_the_whole_answer(port: OpenAiPort) -> None:
    options: Any = {
        "model": "run",
        "messages": ASK,
        "max_tokens": 9,
        "n": 2,
        "seed": 5,
        "temperature": 2.0,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole = await port.client.chat.completions.create(**options)
    text, ids, ends, logprobs = ["", ""], [[], []], ["", ""], [[], []]
    chunks = [
        chunk
        async for chunk in await port.client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert {chunk.model for chunk in chunks} == {"run@1"} and len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 10
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for chunk in chunks:
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {}).get("token_ids", [])
            ends[choice.index] += choice.finish_reason or ""
            logprobs[choice.index] += [] if choice.logprobs is None else choice.logprobs.content or []
    for number, choice in enumerate(whole.choices):
        assert text[number] == choice.message.content and ends[number] == choice.finish_reason
        assert ids[number] == choice.model_extra["token_ids"]
        assert choice.logprobs is not None and logprobs[number] == choice.logprobs.content


async def test_completions_take_texts_and_ids_unchanged(port: OpenAiPort) -> None:
    codec = port.sampling.codec
    first, second = codec.ids_of_plain("12+3"), codec.ids_of_plain("4=")
    answer = await port.client.completions.create(
        model="run",
        prompt=[first, second],
        n=2,
        max_tokens=5,
        seed=1,
        logprobs=1,
        extra_body={"return_token_ids": True},
    )
    assert [one[2].tolist() for one in port.sampling.asked] == [first, second]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.model_extra["prompt_token_ids"] for choice in answer.choices] == [first, first, second, second]
    for choice in answer.choices:
        ids, told = choice.model_extra["token_ids"], choice.logprobs
        assert told is not None and told.tokens == [codec.text([one]) for one in ids]
        assert told.top_logprobs == [
            {token: logprob} for token, logprob in zip(told.tokens, told.token_logprobs, strict=True)
        ]
        assert choice.text == codec.decode(ids)
    told = answer.choices[0].logprobs
    assert told is not None and told.text_offset is not None and told.text_offset[0] == 0
    text = await port.client.completions.create(model="run", prompt="12+34=", seed=1, logprobs=0)
    assert port.sampling.asked[-1][2].tolist() == codec.encode_raw("12+34=").tolist()
    assert port.sampling.asked[-1][3].max_tokens == 16 and text.choices[0].logprobs is not None


async def test_streamed_completions_are_the_whole_ones(port: OpenAiPort) -> None:
    options: Any = {
        "model": "run",
        "prompt": ["1+2=", "3+4="],
        "n": 2,
        "max_tokens": 6,
        "seed": 1,
        "logprobs": 0,
        "temperature": 1.5,
        "extra_body": {"return_token_ids": True},
    }
    whole = await port.client.completions.create(**options)
    text: dict[int, str] = {}
    prompts: dict[int, list[int]] = {}
    offsets: dict[int, list[int]] = {}
    async for chunk in await port.client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                offsets[choice.index] = offsets.get(choice.index, []) + (choice.logprobs.text_offset or [])
            prompts.setdefault(choice.index, (choice.model_extra or {}).get("prompt_token_ids", []))
    assert [text[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert [prompts[number] for number in range(4)] == [c.model_extra["prompt_token_ids"] for c in whole.choices]
    assert [offsets[c.index] for c in whole.choices] == [c.logprobs.text_offset for c in whole.choices if c.logprobs]


async def test_generate_answers_in_ids(port: OpenAiPort) -> None:
    codec = port.sampling.codec
    prompt = codec.encode_prompt("12+34=").tolist()
    body = {
        "model": "run",
        "token_ids": prompt,
        "sampling_params": {
            "temperature": 1.0, "max_tokens": 7, "n": 2, "logprobs": 1, "stop_token_ids": [codec.ids_of_plain("4")[0]],
            "skip_special_tokens": False, "top_p": 1.0, "seed": 4,
        },
        "cache_salt": "3",
        "priority": 0,
    }  # fmt: skip
    status, answer = await port.post(GENERATE, body)
    assert status == 200 and answer["prompt_token_ids"] == prompt and answer["model"] == "run@1"
    assert port.sampling.asked[0][3].stop_ids == {codec.ids_of_plain("4")[0]}
    for choice in answer["choices"]:
        ids, told = choice["token_ids"], choice["logprobs"]["content"]
        assert [entry["token"] for entry in told] == [f"token_id:{one}" for one in ids]
        assert choice["finish_reason"] in ("stop", "length") and answer["request_id"]
    status, answer = await port.post(GENERATE, {**body, "stream": True})
    assert status == 400 and answer["error"]["param"] == "stream"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_before_them(port: OpenAiPort, stream: bool) -> None:
    plain = await port.client.completions.create(model="run", prompt="12+34=", max_tokens=12, seed=2, temperature=1.5)
    text = plain.choices[0].text
    assert len(text) > 6
    stop = text[3:5]
    options: Any = {
        "model": "run",
        "prompt": "12+34=",
        "max_tokens": 12,
        "seed": 2,
        "temperature": 1.5,
        "stop": ["zz", stop],
    }
    if stream:
        chunks = [chunk async for chunk in await port.client.completions.create(**options, stream=True)]
        shown = "".join(chunk.choices[0].text for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        cut = await port.client.completions.create(**options)
        shown, finish = cut.choices[0].text, cut.choices[0].finish_reason
    assert shown == text[: text.index(stop)] and finish == "stop"


async def test_options_reach_the_service(port: OpenAiPort) -> None:
    context = port.sampling.codec.context_tokens
    await port.client.chat.completions.create(model="base", messages=ASK, max_completion_tokens=3, temperature=0)
    wish = port.sampling.asked[-1][3]
    assert (wish.max_tokens, wish.temperature, wish.seed, wish.stop_ids, wish.checked) == (3, 0.0, None, None, False)
    await port.client.completions.create(
        model="base", prompt=[5] * 250, max_tokens=10**6, seed=-1, extra_body={"ignore_eos": True, "checked": True}
    )
    wish = port.sampling.asked[-1][3]
    assert (wish.max_tokens, wish.seed, wish.stop_ids, wish.checked) == (context - 250, 2**64 - 1, frozenset(), True)


async def test_models_are_listed_with_their_context(port: OpenAiPort) -> None:
    listed = [model async for model in port.client.models.list()]
    assert [model.id for model in listed] == ["run", "run@latest", "run@1", "base", "Qwen/Qwen3-8B"]
    assert {model.model_extra["max_model_len"] for model in listed} == {256}
    one = await port.client.models.retrieve("Qwen/Qwen3-8B")
    assert one.id == "Qwen/Qwen3-8B" and (one.model_extra or {})["root"] == "base"
    with pytest.raises(openai.NotFoundError) as missing:
        await port.client.models.retrieve("run@99")
    assert missing.value.code == "model_not_found"


async def test_tokens_are_checked(port: OpenAiPort) -> None:
    for key in ("wrong", "echo_wrong", ""):
        client = port.client.with_options(api_key=key or "x", default_headers={} if key else {"Authorization": ""})
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model="run", messages=ASK)
        assert refused.value.code == "invalid_api_key"
    await port.client.with_options(api_key=f"tml-{port.key}").models.list()
    basic = base64.b64encode(f"x:{port.key}".encode()).decode()
    assert (await port.post(COMPLETIONS, {"model": "base", "prompt": "1"}, Authorization=f"Basic {basic}"))[0] == 200
    for wrong in ("Basic !", "Basic eDp5", f"Basic {port.key}"):
        assert (await port.post(COMPLETIONS, {"model": "base", "prompt": "1"}, Authorization=wrong))[0] == 401
    admin, token = token_of("root", "admin")
    port.tokens.renew([token])
    with pytest.raises(openai.PermissionDeniedError):
        await port.client.with_options(api_key=admin).models.list()
    async with port.http.get(f"{port.url}/health") as answer:
        assert answer.status == 200 and await answer.json() == {}


async def test_errors_have_the_form_that_clients_know(port: OpenAiPort) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await port.client.chat.completions.create(model="gpt-5", messages=ASK)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        await port.client.completions.create(model="run", prompt=[5] * 256)
    assert long.value.code == "context_length_exceeded" and "maximum context length is 256 tokens" in str(long.value)
    for kind, error in (
        (RefusalKind.TOO_MANY, openai.RateLimitError),
        (RefusalKind.NOT_READY, openai.InternalServerError),
        (RefusalKind.QUOTA_SPENT, openai.APIStatusError),
    ):
        port.sampling.refusal = Refusal(
            kind, "It cannot be.", retry_after_s=7.2 if kind is RefusalKind.TOO_MANY else None
        )
        for stream in (False, True):
            with pytest.raises(error) as refused:
                await port.client.chat.completions.create(model="run", messages=ASK, stream=stream)
            assert refused.value.response.status_code == {"too_many": 429, "not_ready": 503, "quota_spent": 402}[kind]
            if kind is not RefusalKind.QUOTA_SPENT:
                wait = refused.value.response.headers["retry-after"]
                assert wait == ("8" if kind is RefusalKind.TOO_MANY else "5")


async def test_a_failure_within_a_stream_is_its_last_event(port: OpenAiPort) -> None:
    port.sampling.refusal = Refusal(RefusalKind.NOT_READY, "The device was lost.")
    port.sampling.refusal_after_tokens = 2
    with pytest.raises(openai.APIError, match="The device was lost"):
        async for _ in await port.client.completions.create(model="run", prompt="1+2=", max_tokens=50, stream=True):
            pass


async def test_an_error_of_the_hub_is_told_without_its_details(
    port: OpenAiPort, caplog: pytest.LogCaptureFixture
) -> None:
    port.sampling.refusal = RuntimeError("secret")
    for tokens, error in ((0, openai.InternalServerError), (2, openai.APIError)):
        port.sampling.refusal_after_tokens = tokens
        with pytest.raises(error, match="its log says why") as failed:
            async for _ in await port.client.completions.create(model="run", prompt="1+2=", stream=True):
                pass
        assert "secret" not in str(failed.value)
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_drawing(
    port: OpenAiPort, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "LOOK_S", 0.05)
    monkeypatch.setattr(answering, "HEAD_S", 0.05)
    monkeypatch.setattr(answering, "COMMENT_S", 0.05)
    port.sampling.hold = asyncio.Event()
    body = {"model": "run", "prompt": ["1+2=", "3+4="], "max_tokens": 5, "stream": stream}
    async with aiohttp.ClientSession() as leaving:
        sent = leaving.post(port.url + COMPLETIONS, json=body, headers={"Authorization": f"Bearer {port.key}"})
        asking = asyncio.create_task(_head_of(sent))
        await until(lambda: len(port.sampling.asked) == 2)
        asking.cancel()
    await until(lambda: port.sampling.num_cancelled == 2)
    assert port.api.num_held_bytes == 0


async def _head_of(sent: Any) -> None:
    async with sent as answer:
        await answer.read()


async def test_comments_keep_a_waiting_stream_open(port: OpenAiPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "HEAD_S", 0.05)
    monkeypatch.setattr(answering, "COMMENT_S", 0.05)
    port.sampling.hold = asyncio.Event()
    stream = await port.client.completions.create(model="run", prompt="1+2=", max_tokens=4, stream=True)
    assert stream.response.status_code == 200 and stream.response.headers["cache-control"] == "no-store"
    async with asyncio.timeout(DEADLINE_S):
        raw = stream.response.aiter_raw()
        waited = b""
        while waited.count(b"\n\n") < 3:
            waited += await anext(raw)
        port.sampling.hold.set()
        rest = b"".join([piece async for piece in raw])
    assert all(line == b": waiting" for line in waited.strip().split(b"\n\n"))
    events = [line for line in rest.decode().split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]" and json.loads(events[0].removeprefix("data: "))["object"] == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_fail_if_nothing_draws_them(
    port: OpenAiPort, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_S", "COMMENT_S", "LOOK_S"):
        monkeypatch.setattr(answering, name, 0.02)
    monkeypatch.setattr(answering, "NOT_READY_S", 0.2)
    port.sampling.hold, port.sampling.reason = asyncio.Event(), "No node is connected."
    error = openai.APIError if stream else openai.InternalServerError
    with pytest.raises(error, match="No node is connected") as failed:
        answer: Any = await port.client.completions.create(model="run", prompt="1+2=", stream=stream)
        async for _ in answer:
            pass
    assert stream or failed.value.response.status_code == 503
    await until(lambda: port.sampling.num_cancelled == 1)
    port.sampling.reason = ""
    waiting = asyncio.create_task(port.client.completions.create(model="run", prompt="1+2=", max_tokens=2))
    await asyncio.sleep(0.5)
    port.sampling.hold.set()
    assert (await waiting).choices[0].finish_reason


async def test_a_client_that_does_not_read_its_stream_is_left(
    port: OpenAiPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "WRITE_S", 0.2)
    monkeypatch.setattr(event_stream.ChunkStream, "comment", _flood)
    monkeypatch.setattr(answering, "HEAD_S", 0.01)
    port.sampling.hold = asyncio.Event()
    monkeypatch.setattr(answering, "COMMENT_S", 0.0)
    body = json.dumps({"model": "run", "prompt": "1+2=", "stream": True}).encode()
    host, _, at = port.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(at), limit=1_024)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {port.key}",
        f"Content-Length: {len(body)}",
    )
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    await until(lambda: port.sampling.num_cancelled == 1)
    writer.close()


async def _flood(stream: event_stream.ChunkStream, _text: str) -> None:
    await stream._write(":" + "x" * 2**20 + "\n\n")


async def test_a_revoked_token_ends_its_stream(port: OpenAiPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "HEAD_S", 0.05)
    port.sampling.hold = asyncio.Event()
    stream = await port.client.completions.create(model="run", prompt="1+2=", max_tokens=4, stream=True)
    port.tokens.renew([])
    with pytest.raises(openai.APIError, match="no longer valid"):
        async with asyncio.timeout(DEADLINE_S):
            async for _ in stream:
                pass
    assert port.sampling.num_cancelled == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"model"', "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"model": ' + b'{"a":' * 200 + b"1" + b"}" * 201, "nests"),
        (b'{"model": "run", "model": "base"}', "more than once"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"seed": 1e999}', "too large"),
        (b'{"n": ' + b"9" * 5_000 + b"}", "5000 digits"),
        (b'{"model": "\\ud800"}', "one half of a character"),
        (b'{"model": 3, "messages": []}', "model"),
        (b'{"model": "run"}', "lacks 'messages'"),
    ],
)
async def test_hostile_bodies_are_refused(port: OpenAiPort, data: bytes, said: str) -> None:
    status, answer = await port.post(CHAT, data=data)
    assert status == 400 and said in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    assert not port.sampling.asked


async def test_the_bodies_of_all_requests_together_are_bounded(
    port: OpenAiPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer = await port.post(COMPLETIONS, data=io.BytesIO(b"x" * (MOST_BODY_BYTES + 1)))
    assert status == 413 and answer["error"]["code"] == "request_too_large"
    reader = request_body.BodyReader(most_bytes=MOST_BODY_BYTES, most_held_bytes=2 * 2**20)
    monkeypatch.setattr(port.api, "_bodies", reader)

    async def slow() -> Any:
        yield b" " * 2**20
        await asyncio.sleep(DEADLINE_S)

    headers = {"Authorization": f"Bearer {port.key}"}
    asking = asyncio.create_task(_head_of(port.http.post(port.url + COMPLETIONS, data=slow(), headers=headers)))
    await until(lambda: reader.num_held_bytes == 2**20)
    async with port.http.post(port.url + COMPLETIONS, data=b"{" + b" " * 100, headers=headers) as refused:
        assert refused.status == 429 and refused.headers["Retry-After"] == "1"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: reader.num_held_bytes == 0)


async def test_broken_and_compressed_bodies_are_the_client_s_error(
    port: OpenAiPort, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await port.post(CHAT, data=zlib.compress(b"{}"), **{"Content-Encoding": "deflate"})
    assert status == 400 and "compressed" in answer["error"]["message"]
    host, _, at = port.url.removeprefix("http://").partition(":")
    head = (f"POST {CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {port.key}")
    for rest in (["Transfer-Encoding: chunked", "", "2", "{}", "nonsense", ""], ["Content-Length: 9", "", "{"]):
        _, writer = await asyncio.open_connection(host, int(at))
        writer.write("\r\n".join([*head, *rest]).encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
    await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.levelname == "ERROR"] and not port.sampling.asked


async def test_chunked_bodies_are_bounded_too(port: OpenAiPort) -> None:
    async def endless() -> Any:
        for _ in range(MOST_BODY_BYTES // 2**16 + 2):
            yield b" " * 2**16

    headers = {"Authorization": f"Bearer {port.key}"}
    async with port.http.post(port.url + CHAT, data=endless(), headers=headers) as answer:
        assert answer.status == 413
    assert port.api.num_held_bytes == 0
