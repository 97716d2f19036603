"""The tenants' service as the APIs use it: identities of requests, their order, outcomes, and access to other tenants'
objects.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import numpy as np
import pytest

from echo_hub.store.tenant_reading import read_waiting_requests
from echo_hub.tenants import model_requests
from echo_hub.tenants.drawing import DrawnPiece
from echo_hub.tenants.outcomes import Accepted, Failed, ModelCreated, Pending, StepTaken, WeightsLoaded, WeightsSaved
from echo_hub.tenants.quotas import TenantLimits
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import (
    AdamStep,
    Datum,
    ForwardBackward,
    LoraWish,
    LossFunction,
    PassResult,
    Sample,
    SampleResult,
    SamplingWish,
    WeightsKind,
)
from echo_hub.tenants.service import TenantService
from tests.echo_hub.tenants.conftest import TenantHub, ended
from tests.echo_hub.tenants.small_models import BAD_TOKEN, HELD_TOKEN

ALIAS = "Qwen/Qwen3-8B"
PROMPT = np.array([5, 6, 7], np.int32)


def passing(*token_ids: int, forward_only: bool = False) -> ForwardBackward:
    ids = np.array(token_ids, np.int32)
    data = (Datum(input_ids=ids, loss_inputs={"target_tokens": ids.astype(np.int64)}),)
    return ForwardBackward(data=data, loss=LossFunction.CROSS_ENTROPY, forward_only=forward_only)


async def new_model(service: TenantService, tenant_id: str = "ada", *, number: int = 0) -> str:
    session_id = await service.create_session(tenant_id, about={})
    accepted = await service.create_model(
        tenant_id,
        session_id,
        model_seq_id=number,
        base_model=ALIAS,
        lora=LoraWish(rank=8, seed=5),
        user_metadata={"renderer_name": "qwen3"},
    )
    created = await ended(service, accepted.request_id, tenant_id)
    assert created == ModelCreated(model_id=f"{session_id}:train:{number}")
    return f"{session_id}:train:{number}"


async def new_sampler(service: TenantService, tenant_id: str = "ada") -> str:
    session_id = await service.create_session(tenant_id, about={})
    return await service.create_sampler(tenant_id, session_id, sampler_seq_id=0, base_model=ALIAS)


async def test_requests_run_in_the_order_of_seq_id(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        step = await service.optim_step("ada", model_id, seq_id=3, step=AdamStep())
        second = await service.forward_backward("ada", model_id, seq_id=2, request=passing(2))
        waiting = await service.outcome("ada", step.request_id, wait_s=0.05)
        assert isinstance(waiting, Pending) and "seq_id 1 has not come" in waiting.reason
        first = await service.forward_backward("ada", model_id, seq_id=1, request=passing(1))
        assert isinstance(await ended(service, step.request_id), StepTaken)
        for accepted in (first, second):
            assert isinstance(await ended(service, accepted.request_id), PassResult)
        done = [name for name, _ in tenant_hub.starter.current.calls]
        assert done == ["create", "forward_backward", "forward_backward", "optim_step"]


async def test_the_same_identity_gives_the_same_request(hub_of_each: TenantHub) -> None:
    async with hub_of_each.serving() as service:
        model_id = await new_model(service)
        asked = [service.forward_backward("ada", model_id, seq_id=1, request=passing(1)) for _ in range(3)]
        accepted = {each.request_id for each in await asyncio.gather(*asked)}
        assert len(accepted) == 1
        await ended(service, accepted.pop())
        calls = hub_of_each.starter.current.calls
        assert [name for name, _ in calls].count("forward_backward") == 1


async def test_a_failed_pass_fails_the_step_and_nothing_else(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        requests = [passing(1), passing(BAD_TOKEN), AdamStep(), passing(3), AdamStep()]
        outcomes = []
        for seq_id, request in enumerate(requests, 1):
            if isinstance(request, AdamStep):
                accepted = await service.optim_step("ada", model_id, seq_id=seq_id, step=request)
            else:
                accepted = await service.forward_backward("ada", model_id, seq_id=seq_id, request=request)
            outcomes.append(await ended(service, accepted.request_id))
        assert [type(each) for each in outcomes] == [PassResult, Failed, Failed, PassResult, StepTaken]
        assert isinstance(outcomes[2], Failed) and outcomes[2].category == "user"
        assert "incomplete" in outcomes[2].error
        assert (await service.model("ada", model_id)).steps == 1

        other = await new_model(service)
        await service.forward_backward("ada", other, seq_id=1, request=passing(3))
        await ended(service, (await service.optim_step("ada", other, seq_id=2, step=AdamStep())).request_id)
        models = tenant_hub.starter.current.models
        assert models[model_id].weights.tolist() == models[other].weights.tolist()


async def test_a_request_that_the_wire_refused_is_passed_by(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        third = await service.optim_step("ada", model_id, seq_id=3, step=AdamStep())
        await service.refused("ada", model_id, seq_id=1, spoils=False)
        await service.refused("ada", model_id, seq_id=2, spoils=True)
        await service.refused("ada", model_id, seq_id=2, spoils=True)
        assert isinstance(await ended(service, third.request_id), Failed)
        with pytest.raises(Refusal, match="was refused before"):
            await service.forward_backward("ada", model_id, seq_id=2, request=passing(1))


async def test_samples_depend_on_the_seed_alone(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        sampler_id = await new_sampler(service)
        wish = SamplingWish(num_samples=3, max_tokens=5, seed=17)
        results = []
        for seq_id in (0, 10**9):
            accepted = await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT, wish=wish)
            assert len(accepted.sequence_ids) == 3
            result = await ended(service, accepted.request_id)
            assert isinstance(result, SampleResult)
            assert [sample.sequence_id for sample in result.samples] == list(accepted.sequence_ids)
            assert [sample.index for sample in result.samples] == [0, 1, 2]
            results.append([sample.token_ids.tolist() for sample in result.samples])
        assert results[0] == results[1]
        assert len({tuple(ids) for ids in results[0]}) == 3


async def test_equal_requests_without_a_seed_share_one(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        sampler_id = await new_sampler(service)
        wish = SamplingWish(max_tokens=12)
        drawn = set()
        for seq_id in range(4):
            accepted = await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT, wish=wish)
            result = await ended(service, accepted.request_id)
            assert isinstance(result, SampleResult)
            drawn.add(tuple(result.samples[0].token_ids))
        assert len(drawn) == 4


async def test_ended_samples_are_listed_for_each_clone(hub_of_each: TenantHub) -> None:
    async with hub_of_each.serving() as service:
        sampler_id = await new_sampler(service)
        wish = SamplingWish(max_tokens=3)
        of_clones: dict[int, list[str]] = {0: [], 1: []}
        for clone, ids in of_clones.items():
            for number in range(3):
                seq_id = clone * 10**9 + number
                accepted = await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT, wish=wish)
                ids.append(accepted.request_id)
        for clone, ids in of_clones.items():
            cursor, found = 0, []
            while len(found) < 3:
                some, cursor = await service.finished_samples("ada", sampler_id, clone=clone, cursor=cursor, wait_s=5)
                found += some
            assert sorted(found) == sorted((each, False) for each in ids)
            assert await service.finished_samples("ada", sampler_id, clone=clone, cursor=cursor, wait_s=0.01) == (
                (),
                cursor,
            )
        assert not service._parts.core.futures._news, "nothing stays of calls that waited in vain"


async def test_a_cancelled_sample_fails(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        sampler_id = await new_sampler(service)
        await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=3))
        await asyncio.sleep(0.05)
        tenant_hub.starter.current.draws_go_on.clear()
        accepted = await service.sample("ada", sampler_id, seq_id=1, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=3))
        assert isinstance(await service.outcome("ada", accepted.request_id, wait_s=0.05), Pending)
        await service.cancel("ada", accepted.request_id)
        outcome = await ended(service, accepted.request_id)
        assert isinstance(outcome, Failed) and "cancelled" in outcome.error


async def test_saved_weights_draw_and_load(hub_of_each: TenantHub) -> None:
    async with hub_of_each.serving() as service:
        model_id = await new_model(service)
        await service.forward_backward("ada", model_id, seq_id=1, request=passing(1, 2))
        await service.optim_step("ada", model_id, seq_id=2, step=AdamStep(learning_rate=0.5))
        saved = await service.save_weights("ada", model_id, seq_id=3, kind=WeightsKind.TRAINING, name="final")
        path = f"tinker://{model_id}/weights/final"
        assert await ended(service, saved.request_id) == WeightsSaved(path=path)
        drawing = await service.save_weights(
            "ada", model_id, seq_id=4, kind=WeightsKind.SAMPLER, name=None, sampler_seq_id=7
        )
        sampler_id = model_id.replace("train:0", "sample:7")
        assert await ended(service, drawing.request_id) == WeightsSaved(sampler_id=sampler_id)
        sample = await service.sample(
            "ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=4, seed=1)
        )
        result = await ended(service, sample.request_id)
        assert isinstance(result, SampleResult) and result.policy_version >= 2**30

        session_id = await service.create_session("ada", about={})
        loaded = await service.load_weights("ada", path=path, optimizer=True, session_id=session_id, model_seq_id=0)
        again = f"{session_id}:train:0"
        assert await ended(service, loaded.request_id) == WeightsLoaded(path=path, model_id=again, steps=1)
        models = hub_of_each.starter.current.models
        assert models[again].weights.tolist() == models[model_id].weights.tolist()
        info = await service.model("ada", again)
        assert (info.user_metadata, info.steps) == ({"renderer_name": "qwen3"}, 1)
        assert [each.path for each in await service.checkpoints("ada")] == [path]


async def test_names_and_numbers_of_published_weights_are_used_once(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        asked = [{"name": "a"}, {"name": "a"}, {"name": None, "sampler_seq_id": 3}, {"name": None, "sampler_seq_id": 3}]
        accepted = [
            await service.save_weights("ada", model_id, seq_id=seq_id, kind=WeightsKind.SAMPLER, **one)  # type: ignore[arg-type]
            for seq_id, one in enumerate(asked, 1)
        ]
        outcomes = [await ended(service, one.request_id) for one in accepted]
        path, session_id = f"tinker://{model_id}/sampler_weights/a", model_id.partition(":")[0]
        with pytest.raises(Refusal, match="does not serve"):
            await service.create_sampler("ada", session_id, sampler_seq_id=4, base_model="another\0", path=path)
        for _ in range(2):
            await service.create_sampler("ada", session_id, sampler_seq_id=4, path=path)
        for number, options in ((4, {"base_model": ALIAS}), (3, {"base_model": ALIAS}), (3, {"path": path})):
            with pytest.raises(Refusal, match="used up"):
                await service.create_sampler("ada", session_id, sampler_seq_id=number, **options)
    assert [isinstance(one, WeightsSaved) for one in outcomes] == [True, False, True, False]
    failed = [one for one in outcomes if isinstance(one, Failed)]
    assert [one.category for one in failed] == ["user", "user"]
    assert "overwrite" in failed[0].error and "next sampling_session_seq_id" in failed[1].error


async def test_tenants_know_nothing_of_each_other(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id, sampler_id = await new_model(service), await new_sampler(service)
        saved = await service.save_weights("ada", model_id, seq_id=1, kind=WeightsKind.TRAINING, name="a")
        await ended(service, saved.request_id)
        path, session_id = f"tinker://{model_id}/weights/a", model_id.partition(":")[0]
        own = await service.create_session("eve", about={})
        for attempt in (
            service.outcome("eve", saved.request_id, wait_s=0),
            service.cancel("eve", saved.request_id),
            service.heartbeat("eve", session_id),
            service.finish_session("eve", session_id),
            service.optim_step("eve", model_id, seq_id=2, step=AdamStep()),
            service.sample("eve", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=SamplingWish()),
            service.sampler("eve", sampler_id),
            service.finished_samples("eve", sampler_id, clone=0, cursor=0, wait_s=0),
            service.model("eve", model_id),
            service.weights("eve", path),
            service.delete_weights("eve", path),
            service.set_ttl("eve", path, 1.0),
            service.load_weights("eve", path=path, optimizer=True, session_id=own, model_seq_id=0),
            service.create_sampler("eve", own, sampler_seq_id=0, path=path),
            service.resolve("eve", path),
        ):
            with pytest.raises(Refusal) as refused:
                await attempt
            assert refused.value.kind is RefusalKind.NOT_FOUND, attempt
        assert await service.models("eve") == () and await service.checkpoints("eve") == ()
        await service.retrieved("eve", [saved.request_id])
        await service.refused("eve", model_id, seq_id=2, spoils=True)
        step = await service.optim_step("ada", model_id, seq_id=2, step=AdamStep())
        assert isinstance(await ended(service, step.request_id), StepTaken)


async def test_samples_of_a_tenant_without_access_are_stopped(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        requests = {}
        for tenant in ("ada", "bob"):
            sampler_id = await new_sampler(service, tenant)
            asked = await service.sample(
                tenant,
                sampler_id,
                seq_id=0,
                prompt_ids=np.array([HELD_TOKEN], np.int32),
                wish=SamplingWish(max_tokens=2),
            )
            requests[tenant] = asked.request_id
        assert service.drawing_tenants() == {"ada", "bob"}
        await service.stop_drawing("ada")
        outcome = await ended(service, requests["ada"])
        assert isinstance(outcome, Failed) and "operator" in outcome.error
        assert service.drawing_tenants() == {"bob"}


async def test_samples_without_a_session(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        wish = SamplingWish(num_samples=2, max_tokens=3, prompt_logprobs=True)
        items = [item async for item in service.sample_at_once("ada", model=ALIAS, prompt_ids=PROMPT, wish=wish)]
        assert isinstance(items[-1], SampleResult) and len(items[-1].samples) == 2
        assert items[-1].prompt_logprobs is not None
        names = {name: await service.resolve("ada", name) for name in ("base", ALIAS, "run", "my-run@2", "run@latest")}
        assert names == {"base": "base", ALIAS: "base", "run": "run@3", "my-run@2": "run@2", "run@latest": "run@3"}
        for name in ("run@4", "nothing", "run@x"):
            with pytest.raises(Refusal, match="no such model"):
                await service.resolve("ada", name)


async def test_a_client_that_leaves_pays_for_what_it_has_read(tenant_hub: TenantHub) -> None:
    tenant_hub.limits = TenantLimits(tokens_per_day=100)
    async with tenant_hub.serving() as service:
        wish = SamplingWish(num_samples=2, max_tokens=4)
        async with aclosing(service.sample_at_once("ada", model=ALIAS, prompt_ids=PROMPT, wish=wish)) as items:  # type: ignore[type-var]
            read = [await anext(items), await anext(items), await anext(items)]
        assert isinstance(read[1], Sample) and isinstance(read[2], DrawnPiece)
        paid = service.quotas.used("ada", now=time.time())
        assert len(PROMPT) + 4 + 1 <= paid <= len(PROMPT) + 8
        held = np.array([HELD_TOKEN], np.int32)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(service.sample_at_once("ada", model=ALIAS, prompt_ids=held, wish=wish))
    async with tenant_hub.serving() as service:
        assert service.quotas.used("ada", now=time.time()) == paid, "what was drawn is paid for, and nothing else"


async def test_a_slow_reader_holds_no_turn(tenant_hub: TenantHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_hub.tenants.hub_drawer.WIDTH", 1)
    async with tenant_hub.serving() as service:
        wish = SamplingWish(num_samples=3, max_tokens=4)
        slow = service.sample_at_once("ada", model=ALIAS, prompt_ids=PROMPT, wish=wish)
        await anext(slow)
        async with asyncio.timeout(10):
            items = [item async for item in service.sample_at_once("bob", model=ALIAS, prompt_ids=PROMPT, wish=wish)]
        assert isinstance(items[-1], SampleResult)
        assert isinstance([item async for item in slow][-1], SampleResult)


async def test_an_ended_session_is_gone(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        waiting = await service.optim_step("ada", model_id, seq_id=2, step=AdamStep())
        session_id = model_id.partition(":")[0]
        await service.finish_session("ada", session_id)
        for attempt in (
            service.outcome("ada", waiting.request_id, wait_s=0),
            service.heartbeat("ada", session_id),
            service.optim_step("ada", model_id, seq_id=1, step=AdamStep()),
        ):
            with pytest.raises(Refusal) as refused:
                await attempt
            assert refused.value.kind is RefusalKind.GONE
        assert (await service.model("ada", model_id)).model_id == model_id


async def test_no_request_waits_for_ever_when_its_session_ends(hub_of_each: TenantHub) -> None:
    async with hub_of_each.serving() as service:
        store, wish = service._parts.core.store, SamplingWish(max_tokens=3)
        for is_first in (True, False):
            model_id, sampler_id = await new_model(service), await new_sampler(service)
            asked = {
                model_id: service.forward_backward("ada", model_id, seq_id=1, request=passing(1)),
                sampler_id: service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish),
            }
            for owner_id, request in asked.items():
                session_id = owner_id.partition(":")[0]
                both = (request, service.finish_session("ada", session_id))
                found = await asyncio.gather(*both[:: 1 if is_first else -1], return_exceptions=True)
                accepted = found[0 if is_first else 1]
                if isinstance(accepted, Accepted):
                    with pytest.raises(Refusal) as refused:
                        await ended(service, accepted.request_id)
                    accepted = refused.value
                assert isinstance(accepted, Refusal) and accepted.kind is RefusalKind.GONE
        assert await store.read(read_waiting_requests) == []
        assert service.quotas.num_open("ada") == 0


async def test_numbers_out_of_range_are_refused(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id, sampler_id = await new_model(service), await new_sampler(service)
        session_id = model_id.partition(":")[0]
        for attempt in (
            service.optim_step("ada", model_id, seq_id=0, step=AdamStep()),
            service.optim_step("ada", model_id, seq_id=2**63, step=AdamStep()),
            service.sample("ada", sampler_id, seq_id=-1, prompt_ids=PROMPT, wish=SamplingWish()),
            service.create_sampler("ada", session_id, sampler_seq_id=10**10, base_model="base"),
            service.create_model(
                "ada", session_id, model_seq_id=-1, base_model="base", lora=LoraWish(), user_metadata={}
            ),
            service.create_model(
                "ada", session_id, model_seq_id=1, base_model="base", lora=LoraWish(rank=0), user_metadata={}
            ),
            service.create_model(
                "ada", session_id, model_seq_id=1, base_model="other", lora=LoraWish(), user_metadata={}
            ),
            service.create_session("ada", about={"tags": "x" * 70_000}),
        ):
            with pytest.raises(Refusal) as refused:
                await attempt
            assert refused.value.kind in (RefusalKind.INVALID, RefusalKind.TOO_LARGE)
        await service.refused("ada", model_id, seq_id=0, spoils=True)
        step = await service.optim_step("ada", model_id, seq_id=1, step=AdamStep())
        assert isinstance(await ended(service, step.request_id), StepTaken)


async def test_requests_at_once_do_not_pass_the_limits(tenant_hub: TenantHub, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant_hub.limits = TenantLimits(max_queued=3)
    async with tenant_hub.serving() as service:
        model_id, sampler_id = await new_model(service), await new_sampler(service, "bob")
        held, wish = np.array([HELD_TOKEN], np.int32), SamplingWish(max_tokens=2)
        samples = (service.sample("bob", sampler_id, seq_id=seq_id, prompt_ids=held, wish=wish) for seq_id in range(9))
        # Request 1 is missing, so the others wait.
        passes = [
            service.forward_backward("ada", model_id, seq_id=seq_id, request=passing(1, forward_only=seq_id % 2 == 0))
            for seq_id in range(2, 11)
        ]
        results = await asyncio.gather(*samples, *passes, return_exceptions=True)
        refused = [isinstance(one, Refusal) and one.kind is RefusalKind.TOO_MANY for one in results]
        assert (refused[:9].count(True), refused[9:].count(True)) == (6, 6)
        assert (service.quotas.num_open("ada"), service.quotas.num_open("bob")) == (3, 3)
        await service.finish_session("ada", model_id.partition(":")[0])
        monkeypatch.setattr(model_requests, "MOST_JOURNAL_BYTES", 10)
        model_id = await new_model(service)
        await service.forward_backward("ada", model_id, seq_id=2, request=passing(1, forward_only=True))
        with pytest.raises(Refusal, match="Too much data of this model waits"):
            await service.forward_backward("ada", model_id, seq_id=3, request=passing(1, forward_only=True))


async def test_a_spent_quota_refuses_and_a_full_queue_asks_to_wait(tenant_hub: TenantHub) -> None:
    tenant_hub.limits = TenantLimits(tokens_per_day=8, max_queued=2)
    async with tenant_hub.serving() as service:
        sampler_id = await new_sampler(service)
        wish = SamplingWish(max_tokens=3)
        first = await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        await ended(service, first.request_id)
        tenant_hub.starter.current.draws_go_on.clear()
        waiting = await service.sample("ada", sampler_id, seq_id=1, prompt_ids=PROMPT, wish=wish)
        with pytest.raises(Refusal) as refused:
            await service.sample("ada", sampler_id, seq_id=2, prompt_ids=PROMPT, wish=wish)
        assert refused.value.kind is RefusalKind.QUOTA_SPENT
        again = await service.sample("ada", sampler_id, seq_id=1, prompt_ids=PROMPT, wish=wish)
        assert again.request_id == waiting.request_id, "what was accepted stays accepted"
    tenant_hub.starter.current.draws_go_on.set()
    async with tenant_hub.serving() as service:
        await ended(service, waiting.request_id)
        with pytest.raises(Refusal) as refused:
            await service.sample("ada", sampler_id, seq_id=2, prompt_ids=PROMPT, wish=wish)
        assert refused.value.kind is RefusalKind.QUOTA_SPENT, "the tokens of the day survive a restart"
        other = await new_sampler(service, "eve")
        await service.sample("eve", other, seq_id=0, prompt_ids=PROMPT, wish=wish)
