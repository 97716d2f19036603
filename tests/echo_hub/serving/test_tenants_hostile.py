"""A hostile node on a real hub: none of its samples may reach a tenant that wants only checked ones."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.hostile.engine import ATTACK, FORGED, SHARE
from echo_hub.config.sections import HubConfig
from echo_hub.core.trust.standing import StandingState
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub
from echo_hub.store.standings import read_standings
from echo_hub.tenants.requests import SampleResult, SamplingWish
from tests.echo_hub.serving.test_tenants import CONFIG, PROMPT, ended, give_token
from tests.echo_hub.serving.test_tenants_nodes import adapter_of

NUM_REQUESTS = 4


@pytest.mark.parametrize(
    "attack",
    [
        "temperature 1.5",
        pytest.param("wrong version", marks=pytest.mark.slow),
    ],
)
async def test_only_an_honest_nodes_samples_are_delivered(tmp_path: Path, site: Any, attack: str) -> None:
    """The forger is the only node until the verifier has convicted it. Then an honest node answers the requests."""
    sections = {
        **CONFIG,
        "tenants": {"drawn_by": "nodes", "device": "cpu"},
        "trust": {"verifier_device": "cpu", "first_checked": 16},
    }
    directory = RunDirectory(tmp_path / "run")
    config = HubConfig.model_validate(sections)
    make_run(directory, config)
    give_token(directory)
    forging = {**os.environ, ATTACK: attack, SHARE: "1.0", FORGED: str(tmp_path / "forged")}
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        service = hub.tenants
        assert service is not None
        session_id = await service.create_session("ada", about={})
        sampler_id = await adapter_of(service, session_id)
        wish = SamplingWish(num_samples=16, max_tokens=24, temperature=0.7, stop_ids=frozenset(), checked=True)
        asked = [
            await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT + seq_id, wish=wish)
            for seq_id in range(NUM_REQUESTS)
        ]
        forger = await site.node(hub.url, "forger", module="benchmarks.harness.hostile.node", env=forging)
        trust = hub._resources.coordinator
        async with asyncio.timeout(120):
            while not trust.status().trust.quarantined:
                assert not serving.done(), serving
                await asyncio.sleep(0.2)
        first = await service.outcome("ada", asked[0].request_id, wait_s=0.0)
        assert not isinstance(first, SampleResult), "the forger cannot have answered a whole request"
        honest = await site.node(hub.url, "honest")
        results = [await ended(service, one.request_id) for one in asked]
        nodes = {sample.drawn_by for one in results if isinstance(one, SampleResult) for sample in one.samples}
        assert len(results) == NUM_REQUESTS and len(nodes) == 1
        (standing,) = [row for row in hub._resources.store.store.read(read_standings) if row.node_id in nodes]
        assert standing.state is not StandingState.QUARANTINED and standing.num_failed == 0
        for node in (forger, honest):
            await node.end()
        serving.cancel()
        await asyncio.wait([serving])
