"""Training requests of several tenants that are in the model process at the same time."""

from __future__ import annotations

import asyncio
import time

import pytest

from echo_hub.tenants import model_work
from echo_hub.tenants.model_work import DEATHS
from echo_hub.tenants.order import GAP_S
from echo_hub.tenants.outcomes import Failed, Pending, StepTaken
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import AdamStep, PassResult, WeightsKind
from tests.echo_hub.tenants.conftest import TenantHub, ended
from tests.echo_hub.tenants.small_models import DEADLY_TOKEN, SLOW_TOKEN
from tests.echo_hub.tenants.test_housekeeping import Clock
from tests.echo_hub.tenants.test_service import new_model, passing


async def test_a_large_request_of_a_tenant_does_not_hold_up_others(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        ada, bob = await new_model(service), await new_model(service, "bob")
        second = await new_model(service)
        slow = await service.forward_backward("ada", ada, seq_id=1, request=passing(SLOW_TOKEN))
        waits = await service.forward_backward("ada", second, seq_id=1, request=passing(1))
        passed = await service.forward_backward("bob", bob, seq_id=1, request=passing(1))
        step = await service.optim_step("bob", bob, seq_id=2, step=AdamStep())
        assert isinstance(await ended(service, passed.request_id, "bob"), PassResult)
        assert isinstance(await ended(service, step.request_id, "bob"), StepTaken)
        assert isinstance(await service.outcome("ada", waits.request_id, wait_s=0.05), Pending), "one of a tenant"
        tenant_hub.starter.current.passes_go_on.set()
        for request_id in (slow.request_id, waits.request_id):
            assert isinstance(await ended(service, request_id), PassResult)


async def test_only_the_request_that_kills_the_process_fails(tenant_hub: TenantHub) -> None:
    """Whenever Eve's request kills the process, Ada's request is in the process too."""
    async with tenant_hub.serving() as service:
        ada, eve = await new_model(service), await new_model(service, "eve")
        slow = await service.forward_backward("ada", ada, seq_id=1, request=passing(SLOW_TOKEN))
        await asyncio.sleep(0.05)
        deadly = await service.forward_backward("eve", eve, seq_id=1, request=passing(DEADLY_TOKEN))
        letting_go = asyncio.create_task(let_go(tenant_hub))
        failed = await ended(service, deadly.request_id, "eve")
        assert isinstance(failed, Failed) and f"died {DEATHS} times" in failed.error
        assert isinstance(await ended(service, slow.request_id), PassResult)
        step = await service.optim_step("ada", ada, seq_id=2, step=AdamStep())
        assert isinstance(await ended(service, step.request_id), StepTaken)
        letting_go.cancel()


async def let_go(hub: TenantHub) -> None:
    """Let slow passes finish, also in processes that are started later."""
    while True:
        hub.starter.current.passes_go_on.set()
        await asyncio.sleep(0.01)


async def test_a_model_whose_weights_are_gone_is_not_made_from_others(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        ada = await new_model(service)
        saved = await service.save_weights("ada", ada, seq_id=1, kind=WeightsKind.TRAINING, name="a")
        path = (await ended(service, saved.request_id)).path  # type: ignore[union-attr]
        await service.forward_backward("ada", ada, seq_id=2, request=passing(SLOW_TOKEN))
        session_id = ada.partition(":")[0]
        load = await service.load_weights("ada", path=path, optimizer=True, session_id=session_id, model_seq_id=1)
        step = await service.optim_step("ada", f"{session_id}:train:1", seq_id=1, step=AdamStep())
        await service.delete_weights("ada", path)
        tenant_hub.starter.current.passes_go_on.set()
        outcomes = [await ended(service, one.request_id) for one in (load, step)]
    for outcome, text in zip(outcomes, ("no weights under this path", "never made"), strict=True):
        assert isinstance(outcome, Failed) and outcome.category == "user" and text in outcome.error, outcome


async def test_a_session_may_end_while_its_missing_request_is_given_up(
    tenant_hub: TenantHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(time)
    monkeypatch.setattr(model_work, "time", clock)
    async with tenant_hub.serving() as service:
        ada, bob = await new_model(service), await new_model(service, "bob")
        for tenant_id, model_id in (("ada", ada), ("bob", bob)):  # Request 1 of each never comes.
            first = await service.forward_backward(tenant_id, model_id, seq_id=2, request=passing(1))
        several = [
            await service.forward_backward("ada", ada, seq_id=seq_id, request=passing(1)) for seq_id in (3, 4, 5)
        ]
        clock.ahead = GAP_S + 60.0
        last = await service.forward_backward("ada", ada, seq_id=6, request=passing(1))
        assert isinstance(await ended(service, several[0].request_id), Failed)
        await service.finish_session("bob", bob.partition(":")[0])
        assert isinstance(await ended(service, last.request_id), Failed)
        with pytest.raises(Refusal):
            await service.outcome("bob", first.request_id, wait_s=0)
        await new_model(service, "eve")


async def test_a_session_that_ends_while_its_request_runs_is_forgotten(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        ada, bob = await new_model(service), await new_model(service, "bob")
        await service.forward_backward("ada", ada, seq_id=1, request=passing(SLOW_TOKEN))
        await asyncio.sleep(0.05)
        await service.finish_session("ada", ada.partition(":")[0])
        passed = await service.forward_backward("bob", bob, seq_id=1, request=passing(1))
        assert isinstance(await ended(service, passed.request_id, "bob"), PassResult)
        tenant_hub.starter.current.passes_go_on.set()
        async with asyncio.timeout(10):
            while ada in tenant_hub.starter.current.models:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
