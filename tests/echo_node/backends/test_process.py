"""Each engine in its real child process: several policies, failures, cancellation and sudden death."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_node.backends.base import EngineSettings, GroupFailed
from echo_node.backends.caging import CageTerms
from echo_node.backends.process import (
    HUGE_PAGES,
    Cancelled,
    DrawnTokens,
    EngineChild,
    Finished,
    Prepared,
    WorkerNews,
)
from echo_node.backends.registry import NAMES, BackendChoice
from echo_node.core import effects, events
from echo_node.core.work import WorkLoop
from echo_shared.errors import BackendError
from echo_shared.process.supervised import ChildLimits
from echo_shared.sampling import draws
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, Prefix
from echo_shared.wire.messages import PolicyPublished, Rollout
from tests.echo_node.core.loop_parts import here, lease, offer, welcome


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


async def start(
    base: Path, tmp_path: Path, name: str = "llama_cpp", *, stream_s: float = 0.0, precision: str = "auto"
) -> EngineChild:
    return await EngineChild.start(
        BackendChoice(name=name, device="cpu", reason="test"),
        base_dir=base,
        derived_dir=tmp_path / "derived",
        log=tmp_path / "backend.log",
        settings=EngineSettings(width=6, threads=1, stream_s=stream_s, precision=precision),
        limits=ChildLimits(memory_bytes=8 * 2**30),
        cage=CageTerms(policies=tmp_path.parent),
    )


async def take(engine: EngineChild, count: int) -> list[WorkerNews | FinishedRollout]:
    """Return the next events, at least `count`: an event with several finished rollouts becomes several."""
    events: list[WorkerNews | FinishedRollout] = []
    async for event in engine.events():
        events += event.rollouts if isinstance(event, Finished) else [event]
        if len(events) >= count:
            break
    return events


def installed(name: str) -> bool:
    package = {"torch": "torch", "llama_cpp": "llama_cpp", "mlx": "mlx_lm", "vllm": "vllm"}[name]
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.skipif(not installed(n), reason="not installed")) for n in NAMES]
)
async def test_rollouts_of_several_versions(
    name: str, base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    adapter = make_adapter(base, 1)
    engine = await start(base, tmp_path, name)
    assert engine.tokens_per_s == 0
    await engine.add_policy(1, adapter)
    requests = []
    os.kill(engine.pid, signal.SIGSTOP)  # Suspend the worker, so that it finds all requests queued.
    for number in range(6):
        requests += kit.make_requests(1, policy_version=number % 2, first_lease=number, max_tokens=5)
        await engine.submit(requests[-1])
    os.kill(engine.pid, signal.SIGCONT)
    rollouts = kit.rollouts_of(await take(engine, 24))
    models = [kit.load_reference(base), kit.load_reference(base, adapter)]
    for request in requests:
        for index in request.indices:
            rollout = rollouts[request.lease_id, index]
            ids, _ = kit.reference_rollout(models[request.policy_version], request, index)
            assert rollout.completion_ids.tolist() == ids
            assert rollout.policy_version == request.policy_version
    versions = [rollout.policy_version for rollout in rollouts.values()]
    # Requests alternate between two versions, but the engine must switch only once.
    assert versions == sorted(versions)
    assert engine.tokens_per_s > 0
    await engine.stop()


async def test_another_engine_continues_a_killed_workers_reported_tokens(base: Path, kit: Any, tmp_path: Path) -> None:
    """The worker is killed once each rollout has begun. Another engine continues from the reported tokens, and the
    result must equal that of one engine.
    """
    (request,) = kit.make_requests(1, group_size=6, max_tokens=200)
    request = dataclasses.replace(request, stop_ids=())
    engine = await start(base, tmp_path, stream_s=0.001)
    await engine.submit(request)
    told: dict[int, list[DrawnPart]] = {}
    async for event in engine.events():
        assert isinstance(event, DrawnTokens), "the worker is killed long before the end"
        for part in event.parts:
            told.setdefault(part.index, []).append(part)
        if len(told) == 6 and all(len(parts) >= 3 for parts in told.values()):
            os.kill(engine.pid, signal.SIGABRT)
            break
    await engine.stop()
    prefixes = tuple(
        Prefix(
            index=index,
            ids=np.concatenate([part.ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
        )
        for index, parts in told.items()
    )
    other = await start(base, tmp_path, "torch")
    await other.submit(dataclasses.replace(request, prefixes=prefixes))
    rollouts = kit.rollouts_of(await take(other, 6))
    model = kit.load_reference(base)
    for prefix in prefixes:
        rollout = rollouts[request.lease_id, prefix.index]
        assert rollout.completion_ids.tolist() == kit.reference_rollout(model, request, prefix.index)[0]
        assert rollout.num_given == len(prefix.ids) > 0
    await other.stop()


class SmallNode:
    """A node's work loop with a real engine and nothing else; `rollouts` are those that a node would store on disk."""

    def __init__(self, engine: EngineChild, adapters: dict[int, Path]) -> None:
        self.loop = WorkLoop(capacity_factor=2, unfinished={}, unacked=(), on_disk={})
        self.rollouts: list[Rollout] = []
        self.told: set[tuple[int, int]] = set()
        """Rollouts for which the engine has reported tokens, as (version, index)."""
        self._engine = engine
        self._adapters = adapters

    async def handle(self, *happened: events.Event) -> None:
        for event in happened:
            for effect in self.loop.handle(event, time.monotonic(), 0.0):
                match effect:
                    case effects.AddPolicy(policy_version=version):
                        await self._engine.add_policy(version, self._adapters.get(version))
                    case effects.DropPolicy(policy_version=version):
                        await self._engine.drop_policy(version)
                    case effects.SubmitGroup(request=request):
                        await self._engine.submit(request)
                    case effects.CancelLease(lease_id=lease_id):
                        await self._engine.cancel(lease_id)
                    case effects.SpoolRollout(rollout=rollout):
                        self.rollouts.append(rollout)

    async def publish(self, version: int) -> None:
        await self.handle(PolicyPublished(policy_version=version, offer=offer(version)), here(version))

    async def hear(self, news: WorkerNews) -> None:
        match news:
            case Finished(rollouts=rollouts):
                await self.handle(events.RolloutsFinished(rollouts=rollouts, tokens_per_s=0.0))
            case DrawnTokens(parts=parts):
                self.told |= {(part.policy_version, part.index) for part in parts}
                await self.handle(events.RolloutsDrawn(parts=parts))
            case Cancelled(lease_id=lease_id):
                await self.handle(events.LeaseCancelled(lease_id=lease_id))
            case Prepared(policy_version=version):
                await self.handle(events.PolicyPrepared(policy_version=version))
            case GroupFailed():
                raise AssertionError(news)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.skipif(not installed(n), reason="not installed")) for n in NAMES]
)
async def test_an_interrupted_completion_equals_sampling_by_its_versions(
    name: str,
    base: Path,
    make_adapter: Callable[..., Path],
    kit: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A completion may continue with a newer version. Each token must follow the distribution of its own version, given
    all earlier tokens.
    """
    monkeypatch.setattr("echo_node.backends.process._RATE_WINDOW_S", math.inf)
    adapters = {version: make_adapter(base, version) for version in (1, 2, 3)}
    engine = await start(base, tmp_path, name, stream_s=0.001, precision="f32")
    node = SmallNode(engine, adapters)
    await node.handle(welcome(0), here(None), events.EngineReady(width=engine.width))
    await node.publish(1)
    leased = lease(7, version=1, count=6).model_copy(
        update={"max_tokens": 160, "stop_ids": (), "on_new_version": "interrupt", "seed": 99}
    )
    await node.handle(leased)
    newest = 1
    async for news in engine.events():
        await node.hear(news)
        if newest < 3 and all((newest, index) in node.told for index in range(6)):
            newest += 1
            await node.publish(newest)
        if len(node.rollouts) == 6:
            break
    assert sum(tokens for tokens, _ in engine._recent) == 6 * 160, "each token counts once in the engine's rate"
    await engine.stop()

    models = {version: kit.load_reference(base, adapter) for version, adapter in adapters.items()}
    seen = set()
    for rollout in node.rollouts:
        counts = {span.policy_version: span.num_tokens for span in rollout.versions}
        seen |= counts.keys()
        by = [version for version, count in counts.items() for _ in range(count)]
        ids = rollout.completion_ids.tolist()
        assert len(by) == len(ids) == 160
        context = [*leased.prompt_ids.tolist(), *ids[:-1]]
        logits = {version: kit.reference_logits(models[version], context)[-160:] for version in counts}
        rows = np.stack([logits[version][number] for number, version in enumerate(by)])
        expected, logprobs = draws.draw(rows, draws.uniforms(leased.seed, rollout.index, 160), leased.temperature)
        assert ids == expected.tolist()
        assert np.abs(rollout.behavior_logprobs - logprobs).max() < 2e-4
    assert seen == {1, 2, 3}


async def test_stopping_in_mid_work(base: Path, kit: Any, tmp_path: Path) -> None:
    engine = await start(base, tmp_path)
    for request in kit.make_requests(200, max_tokens=200):
        await engine.submit(request)
    await take(engine, 1)
    await engine.stop()
    with pytest.raises(BackendError, match="was stopped"):
        await take(engine, 100_000)
    await engine.stop()


def test_the_parents_end_imports_no_engine() -> None:
    script = (
        "import sys, echo_node.backends.process, echo_node.backends.registry, echo_node.host.hardware\n"
        "print([name for name in ('torch', 'llama_cpp', 'gguf', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(not has_huge_pages(), reason="this machine has no huge pages for who asks")
def test_large_tensors_use_huge_pages() -> None:
    """Huge pages make large models faster. PyTorch uses them only if the environment says so."""
    program = "import torch; tensor = torch.ones(1 << 24); print(open('/proc/self/smaps_rollup').read())"
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **HUGE_PAGES}, capture_output=True, text=True, check=True
    )
    (kib,) = (int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("AnonHugePages:"))
    assert kib >= 60 << 10, "60 of 64 MiB"
