"""The client with which TRL's trainers sample from a server. It sends no header, so its base URL has the token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.echo_hub.openai.conftest import OpenAiPort
from tests.echo_hub.openai.test_prompts import TOOL

vllm_client = pytest.importorskip("trl.generation.vllm_client")


@pytest.fixture
async def client(port: OpenAiPort, monkeypatch: pytest.MonkeyPatch) -> Any:
    # The client asks whether vLLM is installed, which only its transfer of weights needs.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    one = await asyncio.to_thread(vllm_client.VLLMClient, base_url=port.url.replace("http://", f"http://x:{port.key}@"))
    assert one.model == "run"
    yield one
    one.session.close()


async def test_trl_generates_from_ids(port: OpenAiPort, client: Any) -> None:
    codec = port.sampling.codec
    prompts = [codec.encode_prompt(text).tolist() for text in ("12+34=", "1+1=", "9-2=")]
    told = await asyncio.to_thread(
        client.generate, prompts, n=2, max_tokens=5, temperature=1.2, generation_kwargs={"seed": 8}
    )
    assert told["prompt_ids"] == prompts and len(told["completion_ids"]) == 6
    asked = {tuple(ids.tolist()): wish for _, _, ids, wish in port.sampling.asked}
    assert set(asked) == set(map(tuple, prompts))
    assert {(wish.num_samples, wish.max_tokens, wish.temperature, wish.seed) for wish in asked.values()} == {
        (2, 5, 1.2, 8)
    }
    for ids, logprobs, logprob_ids in zip(
        told["completion_ids"], told["logprobs"], told["logprob_token_ids"], strict=True
    ):
        assert logprob_ids == [[one] for one in ids] and len(logprobs) == len(ids) <= 5
        assert all(len(one) == 1 and one[0] < 0 for one in logprobs)
    texts = await asyncio.to_thread(client.generate, ["12+34="], max_tokens=3)
    assert texts["prompt_ids"] == [codec.encode_raw("12+34=").tolist()]


async def test_trl_chats(port: OpenAiPort, client: Any) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("12+34=", "1+1=")]
    told = await asyncio.to_thread(
        client.chat, conversations, n=2, max_tokens=5, chat_template_kwargs={"enable_thinking": False}
    )
    codec = port.sampling.codec
    assert told["prompt_ids"] == [codec.encode_prompt(text).tolist() for text in ("12+34=", "1+1=")]
    assert len(told["completion_ids"]) == 4
    assert [[[one] for one in ids] for ids in told["completion_ids"]] == told["logprob_token_ids"]


async def test_trl_is_told_what_is_refused(client: Any) -> None:
    for options, said in (
        ({"top_p": 0.9}, "top_p"),
        ({"structured_outputs_regex": "a+"}, "structured_outputs"),
        ({"logprobs": 3}, "logprobs"),
    ):
        with pytest.raises(Exception, match=f"Request failed: 400.*{said}"):
            await asyncio.to_thread(client.generate, [[5, 6]], **options)
    with pytest.raises(Exception, match=r"Request failed: 400.*no chat template"):
        await asyncio.to_thread(client.chat, [[{"role": "user", "content": "1"}]], tools=[TOOL])
