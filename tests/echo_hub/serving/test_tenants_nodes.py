"""Tenants of a real hub whose samples a real node on this machine draws: by the base and by a trained adapter."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub
from echo_hub.store.reports import read_accounting, read_leaderboard
from echo_hub.tenants.drawing import DrawJob
from echo_hub.tenants.hub_drawer import HubDrawer
from echo_hub.tenants.outcomes import Pending
from echo_hub.tenants.requests import AdamStep, LoraWish, Sample, SampleResult, SamplingWish, WeightsKind
from echo_hub.tenants.service import TenantService
from echo_hub.tenants.versions import FIRST_TENANT_VERSION
from tests.echo_hub.serving.test_tenants import CONFIG, PROMPT, ended, give_token, passing


async def by_hub(service: TenantService, directory: RunDirectory, version: int) -> dict[int, list[int]]:
    """Return the tokens that the hub's own device draws for the same request, by sample."""
    job = DrawJob(
        request_id="by hub",
        tenant_id="ada",
        prompt_ids=PROMPT,
        sequence_ids=("0", "1", "2"),
        policy_version=version,
        temperature=0.8,
        max_tokens=12,
        stop_ids=(),
        stop_strings=(),
        seed=5,
        checked=False,
    )
    drawn = [item async for item in HubDrawer(service.host, directory).draw(job) if isinstance(item, Sample)]
    return {int(sample.sequence_id): sample.token_ids.tolist() for sample in drawn}


async def adapter_of(service: TenantService, session_id: str) -> str:
    """Train a model for one large step; return the id of a sampler that draws by its adapter."""
    await service.create_model(
        "ada", session_id, model_seq_id=0, base_model="base", lora=LoraWish(rank=4, seed=3), user_metadata={}
    )
    model_id = f"{session_id}:train:0"
    await service.forward_backward("ada", model_id, seq_id=1, request=passing(9))
    await service.optim_step("ada", model_id, seq_id=2, step=AdamStep(learning_rate=0.05))
    saved = await service.save_weights("ada", model_id, seq_id=3, kind=WeightsKind.SAMPLER, name=None, sampler_seq_id=7)
    await ended(service, saved.request_id)
    return f"{session_id}:sample:7"


async def test_a_node_draws_by_the_base_and_by_an_adapter(tmp_path: Path, site: Any) -> None:
    sections = {**CONFIG, "tenants": {"drawn_by": "nodes", "device": "cpu"}}
    config, directory = HubConfig.model_validate(sections), RunDirectory(tmp_path / "run")
    make_run(directory, config)
    give_token(directory)
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        service = hub.tenants
        assert service is not None
        node = await site.node(hub.url, "volunteer", backend="torch")
        session_id = await service.create_session("ada", about={})
        base = await service.create_sampler("ada", session_id, sampler_seq_id=0, base_model="base")
        stop_free = SamplingWish(num_samples=3, max_tokens=12, temperature=0.8, seed=5, stop_ids=frozenset())
        results = []
        for seq_id, sampler_id in enumerate((base, await adapter_of(service, session_id))):
            accepted = await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT, wish=stop_free)
            result = await ended(service, accepted.request_id)
            assert isinstance(result, SampleResult), result
            assert all(sample.drawn_by for sample in result.samples), "a node drew them"
            assert [sample.finish for sample in result.samples] == ["length"] * 3
            results.append({sample.index: sample.token_ids.tolist() for sample in result.samples})
        assert results[0] == await by_hub(service, directory, 0)
        assert results[1] == await by_hub(service, directory, FIRST_TENANT_VERSION) != results[0]
        books, (volunteer,) = service_store(hub).read(read_accounting), service_store(hub).read(read_leaderboard)
        assert books.balanced and books.answered == 6 == volunteer.answered_rollouts
        assert volunteer.answered_tokens == 6 * 12 and volunteer.share == 1.0
        assert (await node.end())[0] == 0
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_node_whose_owner_refuses_tenants_draws_nothing_for_them(tmp_path: Path, site: Any) -> None:
    """The sample waits while only the unwilling node is there. Then a willing node draws it, and `drawn_by` names that
    node.
    """
    sections = {**CONFIG, "tenants": {"drawn_by": "nodes", "device": "cpu", "show_names": True}}
    config, directory = HubConfig.model_validate(sections), RunDirectory(tmp_path / "run")
    make_run(directory, config)
    give_token(directory)
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        service = hub.tenants
        assert service is not None
        session_id = await service.create_session("ada", about={})
        sampler_id = await service.create_sampler("ada", session_id, sampler_seq_id=0, base_model="base")
        await site.node(hub.url, "unwilling", env={**os.environ, "ECHO_NODE_ANSWERS": "false"})
        await ready(hub, 1)
        wish = SamplingWish(num_samples=2, max_tokens=8, stop_ids=frozenset())
        accepted = await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        outcome = await service.outcome("ada", accepted.request_id, wait_s=2.0)
        assert isinstance(outcome, Pending) and not hub.coordinator.status().in_flight
        await site.node(hub.url, "willing")
        result = await ended(service, accepted.request_id)
        assert isinstance(result, SampleResult), result
        nodes = {node.node_id: node.name for node in service_store(hub).read(read_leaderboard)}
        assert {nodes[sample.drawn_by] for sample in result.samples} == {"willing"}
        serving.cancel()
        await asyncio.wait([serving])


async def ready(hub: Any, number: int) -> None:
    """Wait until `number` nodes ask for work."""
    async with asyncio.timeout(60):
        while sum(node.capacity > 0 for node in hub.live.values()) < number:  # noqa: ASYNC110  # Its report is polled.
            await asyncio.sleep(0.05)


def service_store(hub: Any) -> Any:
    return hub._resources.store.store
