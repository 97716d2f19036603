"""Outcomes with many tokens: they are packed on a thread, also while the hub stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from echo_hub.tenants import futures, recovery
from echo_hub.tenants.outcomes import Outcome, StepTaken
from echo_hub.tenants.requests import AdamStep, PassResult, SampleResult, SamplingWish
from tests.echo_hub.tenants.conftest import TenantHub, ended
from tests.echo_hub.tenants.test_service import PROMPT, new_model, new_sampler, passing


async def test_large_values_do_not_hold_up_the_event_loop(
    tenant_hub: TenantHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes with many tokens, and the journal's requests, may take seconds to pack or unpack."""
    on_loop, off_loop = list[type](), list[type]()

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def watching(value: object, *rest: object) -> Any:
            of_thread = on_loop if threading.current_thread() is threading.main_thread() else off_loop
            of_thread.append(type(value))
            return work(value, *rest)

        return watching

    monkeypatch.setattr(futures, "pack_stored", watched(futures.pack_stored))
    monkeypatch.setattr(recovery, "unpack_stored", watched(recovery.unpack_stored))
    async with tenant_hub.serving() as service:
        sampler_id, model_id = await new_sampler(service), await new_model(service)
        wish = SamplingWish(num_samples=128, max_tokens=60)
        asked = await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        assert isinstance(await ended(service, asked.request_id), SampleResult)
        passed = await service.forward_backward("ada", model_id, seq_id=1, request=passing(1))
        await ended(service, passed.request_id)
        tenant_hub.starter.current.is_dead = True
        step = await service.optim_step("ada", model_id, seq_id=2, step=AdamStep())
        assert isinstance(await ended(service, step.request_id), StepTaken)
    assert off_loop == [SampleResult, PassResult, bytes]
    assert not {SampleResult, PassResult, bytes}.intersection(on_loop)


async def test_a_stop_commits_outcomes_that_are_being_packed(
    tenant_hub: TenantHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(outcome: Outcome) -> bytes:
        if isinstance(outcome, SampleResult):
            is_packing.set()
            time.sleep(0.3)
        return packed(outcome)

    packed, is_packing = futures.pack_stored, threading.Event()
    monkeypatch.setattr(futures, "pack_stored", pack)
    async with tenant_hub.serving() as service:
        sampler_id = await new_sampler(service)
        wish = SamplingWish(num_samples=128, max_tokens=60)
        asked = await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        await asyncio.to_thread(is_packing.wait)
    async with tenant_hub.serving() as service:
        assert isinstance(await ended(service, asked.request_id), SampleResult)
    assert len(tenant_hub.starter.lives) == 1, "the samples are not drawn again"
