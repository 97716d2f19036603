"""OpenAI's client against a whole hub: its port, its guard, tokens, the tenants' service and the process of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_hub.tenants.outcomes import WeightsSaved
from echo_hub.tenants.requests import LoraWish, WeightsKind

ASK: Any = [{"role": "user", "content": "12+34="}]


@dataclass(eq=False)
class ServedHub:
    hub: Hub
    key: str
    client: AsyncOpenAI


CONFIG = {
    "server": {"port": 0},
    "task": {"name": "none"},
    "openai": {"enabled": True},
    "tenants": {"drawn_by": "hub", "device": "cpu", "tokens_per_day": 5_000},
    "learner": {"device": "cpu", "threads": 1},
}


@asynccontextmanager
async def serving(sections: dict[str, Any], run: Path) -> AsyncIterator[ServedHub]:
    config, directory = HubConfig.model_validate(sections), RunDirectory(run)
    make_run(directory, config)
    async with open_hub(config, directory) as hub:
        work = asyncio.create_task(hub.serve())
        key = await made_token(hub, "ada")
        client = AsyncOpenAI(base_url=f"{hub.url}/v1", api_key=key, max_retries=0)
        yield ServedHub(hub=hub, key=key, client=client)
        await client.close()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedHub]:
    async with serving(CONFIG, tmp_path / "run") as opened:
        yield opened


async def made_token(hub: Hub, name: str) -> str:
    headers = {"Authorization": f"Bearer {hub.guard.credentials.token}"}
    asked = {"name": name, "scope": "use"}
    async with (
        aiohttp.ClientSession(hub.url, headers=headers) as operator,
        operator.post("/api/v1/actions/token", json=asked) as answer,
    ):
        assert answer.status == 200
        return str((await answer.json())["secret"])


async def saved_weights(hub: Hub) -> str:
    """Make a model of the tenant Ada, and save it for sampling. Return the path."""
    service = hub.tenants
    assert service is not None
    session_id = await service.create_session("ada", about={})
    lora = LoraWish(rank=2, seed=3)
    await service.create_model("ada", session_id, model_seq_id=0, base_model="base", lora=lora, user_metadata={})
    kind = WeightsKind.SAMPLER
    saved = await service.save_weights("ada", f"{session_id}:train:0", seq_id=1, kind=kind, name="first")
    outcome = await service.outcome("ada", saved.request_id, wait_s=60.0)
    assert isinstance(outcome, WeightsSaved), outcome
    return outcome.path


async def test_a_hub_serves_openai_s_client(served: ServedHub) -> None:
    client, options = served.client, {"max_tokens": 6, "temperature": 1.5, "extra_body": {"return_token_ids": True}}
    models = [model.id async for model in client.models.list()]
    assert models[0] == "base"
    first = await client.chat.completions.create(model="base", messages=ASK, n=3, seed=5, **options)
    again = await client.chat.completions.create(model="run", messages=ASK, n=3, seed=5, **options)
    assert first.model == again.model == "base" and first.choices == again.choices
    assert len({choice.message.content for choice in first.choices}) > 1
    text = ["", "", ""]
    async for chunk in await client.chat.completions.create(
        model="base", messages=ASK, n=3, seed=5, stream=True, **options
    ):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
    assert text == [choice.message.content for choice in first.choices]
    prompt: Any = {"model": "base", "prompt": "12+34=", "max_tokens": 12, "temperature": 2.5, "seed": 4, "n": 4}
    prompt["extra_body"] = {"ignore_eos": True}
    whole = await client.completions.create(**prompt)
    stop = max((choice.text for choice in whole.choices), key=len)[2:4]
    cut = await client.completions.create(**prompt, stop=stop)
    assert len(stop) == 2
    for uncut, choice in zip(whole.choices, cut.choices, strict=True):
        assert choice.text == uncut.text.partition(stop)[0]
        assert choice.finish_reason == ("stop" if stop in uncut.text else uncut.finish_reason)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="run@3", prompt="1")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="echo_wrong").models.list()
    path = await saved_weights(served.hub)
    assert path.startswith("tinker://") and path in [model.id async for model in client.models.list()]
    own = await client.chat.completions.create(model=path, messages=ASK, max_tokens=3, seed=5)
    assert own.model == path and own.system_fingerprint == f"{path}+{first.system_fingerprint.partition('+')[2]}"
    other = client.with_options(api_key=await made_token(served.hub, "bob"))
    assert path not in [model.id async for model in other.models.list()]
    with pytest.raises(openai.APIStatusError) as foreign:
        await other.chat.completions.create(model=path, messages=ASK)
    assert foreign.value.status_code in (403, 404)
    with pytest.raises(openai.APIStatusError) as spent:
        for _ in range(60):
            await client.completions.create(model="base", prompt=[5] * 200, max_tokens=1)
    assert spent.value.status_code == 402 and spent.value.code == "insufficient_quota"


async def test_the_operator_s_pages_and_tenants_routes_stay_apart(served: ServedHub) -> None:
    operator = served.hub.guard.credentials.token
    async with aiohttp.ClientSession(served.hub.url) as http:
        for path in ("/v1/models", "/v1/chat/completions"):
            method = "GET" if path.endswith("models") else "POST"
            async with http.request(method, path, headers={"Authorization": f"Bearer {operator}"}) as answer:
                assert answer.status == 401 and (await answer.json())["error"]["code"] == "invalid_api_key"
        async with http.get("/api/v1/run", headers={"Authorization": f"Bearer {served.key}"}) as answer:
            assert answer.status == 401
        async with http.get("/health") as answer:
            assert answer.status == 200


async def test_a_node_draws_for_openai_s_client(tmp_path: Path, site: Any) -> None:
    sections = {**CONFIG, "tenants": {"drawn_by": "nodes", "device": "cpu"}}
    async with serving(sections, tmp_path / "run") as served:
        asked: Any = {
            "model": "base",
            "messages": ASK,
            "max_tokens": 200,
            "seed": 5,
            "temperature": 1.5,
            "n": 3,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        waiting = asyncio.create_task(served.client.chat.completions.create(**asked))
        node = await site.node(served.hub.url, "volunteer", backend="torch")
        whole = await waiting
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for chunk in await served.client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                ids[choice.index] += (choice.model_extra or {}).get("token_ids", [])
        assert [ids[choice.index] for choice in whole.choices] == [c.model_extra["token_ids"] for c in whole.choices]
        assert (await node.end())[0] == 0
