"""A node is killed in the middle of its completions; another node continues them from the tokens that the hub has
received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from benchmarks.capacity.paced_engine import TOKEN_S
from echo_hub.config.sections import HubConfig, RunConfig, TrustConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.config.task_sections import EvaluationConfig, SamplingConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_hub.store.database import open_to_read
from echo_hub.store.tables import groups, payloads, rollouts
from echo_node.backends.base import EngineSettings
from echo_node.backends.registry import make_engine
from echo_shared.sampling.interface import GroupRequest

pytestmark = pytest.mark.timeout(600)

FLAT = SamplingConfig(temperature=10.0, max_tokens=200)
"""Sampling with so high a temperature that all tokens, the stop token included, are almost equally likely. So
completions are long.
"""
TOLD = 24
"""Minimum number of a completion's tokens that the hub must have before the node is killed."""

CONFIG = HubConfig(
    run=RunConfig(mode="async"),
    training=TrainingConfig(steps=1, groups_per_step=6, group_size=4, lora_rank=2),
    sampling=FLAT,
    evaluation=EvaluationConfig(problems=1),
    learner=LearnerConfig(threads=1),
    server=ServerConfig(port=0, heartbeat_s=1.0, shared_memory=False),
    # With a verifier, a node's completions would not be continued before its first passed check.
    trust=TrustConfig(verifier="off"),
)


async def wait_for(condition: Callable[[], Any], serving: asyncio.Task[None]) -> Any:
    async with asyncio.timeout(240):
        while not (found := condition()):
            assert not serving.done(), serving
            await asyncio.sleep(0.005)
    return found


def told(hub: Hub) -> dict[tuple[int, int], int]:
    """Return how many tokens of each rollout in progress the hub has, by lease and index."""
    leases = hub.partials._leases.items()
    return {(name, i): one.num_tokens for name, lease in leases for i, one in lease.rollouts.items() if one.num_tokens}


def finished(hub: Hub) -> list[Any]:
    columns = (
        rollouts.c.lease_id,
        rollouts.c.index.label("at"),
        rollouts.c.node_id,
        rollouts.c.group_id,
        payloads.c.completion_ids,
        payloads.c.spans,
        groups.c.seed,
    )
    same = (payloads.c.lease_id == rollouts.c.lease_id) & (payloads.c.index == rollouts.c.index)
    query = select(*columns).join(payloads, same).join(groups, groups.c.group_id == rollouts.c.group_id)
    with open_to_read(hub._resources.store.store.engine) as connection:
        return list(connection.execute(query))


def undisturbed(hub: Hub, rows: list[Any], derived: Path) -> Iterator[tuple[Any, list[int]]]:
    """Yield each rollout with the tokens that one uninterrupted engine samples for it."""
    engine = make_engine("torch")
    engine.open(resolve_base("builtin:tiny"), derived, EngineSettings(width=4, threads=1, precision="f32"))
    requests = [
        GroupRequest(
            lease_id=number,
            group_id=row.group_id,
            indices=(row.at,),
            prompt_ids=hub._resources.problems.prompt_ids(row.group_id),
            seed=row.seed,
            policy_version=0,
            temperature=FLAT.temperature,
            max_tokens=FLAT.max_tokens,
            stop_ids=hub._resources.stop_ids,
        )
        for number, row in enumerate(rows)
    ]
    for rollout in chain.from_iterable(engine.sample(iter(requests))):
        yield rows[rollout.lease_id], rollout.completion_ids.tolist()
    engine.close()


@pytest.mark.slow
async def test_a_killed_nodes_completions_are_continued(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_NODE_STREAM_S", "0.02")
    monkeypatch.setenv(TOKEN_S, "0.05")
    directory = RunDirectory(tmp_path / "run")
    make_run(directory, CONFIG)
    async with open_hub(CONFIG, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        nodes = hub._resources.coordinator._nodes
        # A slowed node: even on a busy machine, the hub gets its first tokens before the completion ends.
        first = await site.node(hub.url, "first", backend="torch", module="benchmarks.capacity.paced_node")

        def in_the_middle() -> bool:
            return any(count >= TOLD and nodes.is_proven(next(iter(hub.live))) for count in told(hub).values())

        await wait_for(in_the_middle, serving)
        (killed,) = hub.live
        await first.kill()
        await wait_for(lambda: not hub.live, serving)
        had, before = told(hub), len(finished(hub))
        assert max(had.values()) >= TOLD

        await site.node(hub.url, "second", backend="torch")
        await wait_for(lambda: len(finished(hub)) == 24, serving)
        rows = finished(hub)
        assert len(rows) > before
        gone_on = [row for row in rows if row.spans]
        assert sorted(row.spans[0][2] for row in gone_on) == sorted(had.values()), (
            "each rollout continues from all tokens at the hub"
        )
        for row in gone_on:
            assert [node_id for node_id, _, _ in row.spans] == [killed, row.node_id] and killed != row.node_id
            assert sum(count for _, _, count in row.spans) == len(row.completion_ids) // 4
        view = await hub.pages.run_view()
        gone_on_with, expected = (view.rollouts_gone_on, view.tokens_saved), (len(had), sum(had.values()))
        if view.accounting.dropped.get("duplicate"):
            # On a busy machine, a late rollout may be leased again and continued a second time, which counts as well.
            assert all(np.greater_equal(gone_on_with, expected))
        else:
            assert gone_on_with == expected
        for row, expected in undisturbed(hub, rows, tmp_path / "derived"):
            assert np.frombuffer(row.completion_ids, "<i4").tolist() == expected, (row.lease_id, row.at, row.spans)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
