"""Tenants of a real hub, with the real process for models and the built-in base. The process is killed on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np

from echo_hub.actions.records import Actor
from echo_hub.actions.requests import MakeToken
from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.opening import open_hub
from echo_hub.store.actions import note_action
from echo_hub.store.store import Store
from echo_hub.tenants.outcomes import Outcome, Pending
from echo_hub.tenants.requests import (
    AdamStep,
    Datum,
    ForwardBackward,
    LoraWish,
    LossFunction,
    PassResult,
    SampleResult,
    SamplingWish,
    WeightsKind,
)
from echo_hub.tenants.service import TenantService
from echo_shared.delta.adapter import WEIGHTS_FILE

CONFIG = {
    "task": {"name": "none"},
    "server": {"port": 0},
    "learner": {"threads": 1, "device": "cpu"},
    "trust": {"verifier": "off"},
    "tinker": {"enabled": True, "aliases": {"Qwen/Qwen3-8B": "base"}},
    "tenants": {"drawn_by": "hub", "device": "cpu", "checkpoint_every": 1},
}
PROMPT = np.array([5, 6, 7, 8], np.int32)


def passing(first: int) -> ForwardBackward:
    ids = np.arange(first, first + 6, dtype=np.int32)
    inputs = {"target_tokens": (ids + 1).astype(np.int64), "weights": np.ones(6, np.float32)}
    return ForwardBackward(data=(Datum(input_ids=ids, loss_inputs=inputs),), loss=LossFunction.CROSS_ENTROPY)


def give_token(directory: RunDirectory) -> None:
    """Give the tenant ada a valid token. The hub refuses requests of tenants without one."""
    store = Store.open(directory.database_url)
    wanted = MakeToken(name="ada", scope="use", days=1.0)
    store.write(note_action, wanted, Actor(via="cli", who="owner"), time.time(), secret_hash="0" * 64)
    store.close()


async def ended(service: TenantService, request_id: str) -> Outcome:
    async with asyncio.timeout(120):
        while isinstance(outcome := await service.outcome("ada", request_id, wait_s=30.0), Pending):
            pass
    return outcome


async def trained(service: TenantService, *, kill: bool) -> tuple[str, bytes]:
    """Train a model for two steps, of two passes each. Return its id, and the bytes of its adapter."""
    session_id = await service.create_session("ada", about={})
    await service.create_model(
        "ada", session_id, model_seq_id=0, base_model="base", lora=LoraWish(rank=4, seed=3), user_metadata={}
    )
    model_id, seq_id = f"{session_id}:train:0", 1
    for step in range(2):
        for half in range(2):
            accepted = await service.forward_backward("ada", model_id, seq_id=seq_id, request=passing(9 * step + half))
            outcome = await ended(service, accepted.request_id)
            assert isinstance(outcome, PassResult), outcome
            seq_id += 1
            if kill and (step, half) == (1, 0):
                os.kill(models_pid(service), signal.SIGKILL)
        await service.optim_step("ada", model_id, seq_id=seq_id, step=AdamStep(learning_rate=0.01))
        seq_id += 1
    saved = await service.save_weights("ada", model_id, seq_id=seq_id, kind=WeightsKind.EXTERNAL, name="last")
    outcome = await ended(service, saved.request_id)
    files = await service.weights_files("ada", outcome.path)  # type: ignore[union-attr]
    return model_id, files[WEIGHTS_FILE].read_bytes()


def models_pid(service: TenantService) -> int:
    computer = service.host.running()
    assert computer is not None
    pid: int = computer.pid  # type: ignore[attr-defined]
    return pid


async def test_a_killed_process_for_models_changes_no_bit(tmp_path: Path) -> None:
    config, directory = HubConfig.model_validate(CONFIG), RunDirectory(tmp_path / "run")
    make_run(directory, config)
    give_token(directory)
    async with open_hub(config, directory) as hub:
        serving = asyncio.create_task(hub.serve())
        service = hub.tenants
        assert service is not None
        assert hub.tenant_urls == f"{hub.url}/tinker"  # The settings leave the OpenAI API off.
        _, undisturbed = await trained(service, kill=False)
        model_id, killed = await trained(service, kill=True)
        assert killed == undisturbed
        saved = await service.save_weights(
            "ada", model_id, seq_id=8, kind=WeightsKind.SAMPLER, name=None, sampler_seq_id=0
        )
        await ended(service, saved.request_id)
        sampler_id = model_id.replace("train", "sample")
        drawn = []
        for seq_id in range(2):
            wish = SamplingWish(num_samples=2, max_tokens=8, seed=5, prompt_logprobs=True)
            accepted = await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT, wish=wish)
            result = await ended(service, accepted.request_id)
            assert isinstance(result, SampleResult), result
            assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs.logprobs[0])
            drawn.append([sample.token_ids.tolist() for sample in result.samples])
        assert drawn[0] == drawn[1]
        serving.cancel()
        await asyncio.wait([serving])
