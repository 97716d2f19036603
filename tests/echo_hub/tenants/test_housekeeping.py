"""Sessions, outcomes, weights and samplers that are too old are removed from memory, disk and database."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select

from echo_hub.config.tenants_section import TenantsConfig
from echo_hub.store.store import Store
from echo_hub.store.tenant_tables import tenant_journal, tenant_requests, tenant_versions
from echo_hub.tenants.housekeeping import COUNT_EVERY_S, DOUBT_S, NEWEST_KEPT
from echo_hub.tenants.outcomes import Failed, WeightsSaved
from echo_hub.tenants.quotas import TenantLimits
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, SamplingWish, WeightsKind
from echo_hub.tenants.service import TenantService
from tests.echo_hub.tenants.conftest import TenantHub, ended
from tests.echo_hub.tenants.test_service import PROMPT, new_model, new_sampler, passing


class Clock:
    """A clock that can be set forward, in place of the module `time`."""

    def __init__(self, time: object) -> None:
        self._time = time
        self.ahead = 0.0
        self.jump = 0.0
        """Seconds by which the wall clock is set forward; the monotonic clock does not change."""

    def time(self) -> float:
        return self._time.time() + self.ahead + self.jump  # type: ignore[attr-defined,no-any-return]

    def monotonic(self) -> float:
        return self._time.monotonic() + self.ahead  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    import time

    found = Clock(time)
    monkeypatch.setattr("echo_hub.tenants.housekeeping.time", found)
    monkeypatch.setattr("echo_hub.tenants.weights.time", found)
    monkeypatch.setattr("echo_hub.tenants.model_requests.time", found)
    return found


def directories(hub: TenantHub, kind: str) -> list[str]:
    folder = hub.root / "tenants" / kind
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def number_of(connection: Connection, name: str) -> int:
    tables = {table.name: table for table in (tenant_journal, tenant_requests, tenant_versions)}
    return connection.scalar(select(func.count()).select_from(tables[name])) or 0


async def save(service: TenantService, model_id: str, seq_id: int, kind: WeightsKind, name: str | None) -> str:
    number = None if name else seq_id
    accepted = await service.save_weights("ada", model_id, seq_id=seq_id, kind=kind, name=name, sampler_seq_id=number)
    outcome = await ended(service, accepted.request_id)
    assert isinstance(outcome, WeightsSaved)
    return outcome.path or outcome.sampler_id


async def settled(hub: TenantHub, kind: str, expected: int) -> None:
    async with asyncio.timeout(5):
        while len(directories(hub, kind)) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_session_without_a_sign_of_life_ends(hub_of_each: TenantHub, clock: Clock) -> None:
    async with hub_of_each.serving() as service:
        quiet = await new_model(service)
        await service.forward_backward("ada", quiet, seq_id=1, request=passing(1))
        await service.optim_step("ada", quiet, seq_id=2, step=AdamStep())
        await service.forward_backward("ada", quiet, seq_id=3, request=passing(1))
        kept = await save(service, quiet, 4, WeightsKind.TRAINING, "kept")
        await save(service, quiet, 5, WeightsKind.SAMPLER, None)
        assert len(directories(hub_of_each, "versions")) == len(directories(hub_of_each, "models")) == 1
        clock.ahead = TenantsConfig().session_expires_s + 1
        await service.housekeeping.tidy()
        with pytest.raises(Refusal) as refused:
            await service.heartbeat("ada", quiet.partition(":")[0])
        assert refused.value.kind is RefusalKind.GONE
        await settled(hub_of_each, "versions", 0)
        await settled(hub_of_each, "models", 0)
        assert [each.path for each in await service.checkpoints("ada")] == [kept]
        assert not hub_of_each.starter.current.models
    store = Store.open(hub_of_each.url)
    assert store.read(number_of, "tenant_journal") == 0
    store.close()


async def test_a_heartbeat_keeps_a_session(tenant_hub: TenantHub, clock: Clock) -> None:
    async with tenant_hub.serving() as service:
        sampler_id = await new_sampler(service)
        clock.ahead = TenantsConfig().session_expires_s - 1
        await service.housekeeping.tidy()
        await service.heartbeat("ada", sampler_id.partition(":")[0])


async def test_old_outcomes_are_gone_and_their_identity_stays(hub_of_each: TenantHub, clock: Clock) -> None:
    async with hub_of_each.serving() as service:
        sampler_id = await new_sampler(service)
        wish = SamplingWish(max_tokens=3)
        ids = [
            (await service.sample("ada", sampler_id, seq_id=number, prompt_ids=PROMPT, wish=wish)).request_id
            for number in range(2)
        ]
        await ended(service, ids[0])
        while not (await service.finished_samples("ada", sampler_id, clone=0, cursor=1, wait_s=5))[0]:
            pass
        clock.ahead = TenantsConfig().result_kept_s + 1
        await service.housekeeping.tidy()
        with pytest.raises(Refusal) as refused:
            await service.outcome("ada", ids[0], wait_s=0)
        assert refused.value.kind is RefusalKind.GONE
        await ended(service, ids[1])
        again = await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        assert again.request_id == ids[0]


async def test_a_tenant_that_reads_no_results_is_refused_until_they_are_deleted(tmp_path: Path, clock: Clock) -> None:
    hub = TenantHub(tmp_path, limits=TenantLimits(max_result_bytes=1))
    async with hub.serving() as service:
        sampler_id = await new_sampler(service)
        ask = partial(service.sample, "ada", sampler_id, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=3))
        await ended(service, (await ask(seq_id=0)).request_id)
        clock.ahead = COUNT_EVERY_S + 1
        await service.housekeeping.tidy()
        with pytest.raises(Refusal, match="stored results") as refused:
            await ask(seq_id=1)
        assert refused.value.kind is RefusalKind.TOO_MANY
        clock.ahead += TenantsConfig().unread_result_kept_s
        await service.heartbeat("ada", sampler_id.partition(":")[0])
        await service.housekeeping.tidy()
        await ask(seq_id=1)


async def test_weights_end_with_their_time_to_live(hub_of_each: TenantHub, clock: Clock) -> None:
    async with hub_of_each.serving() as service:
        model_id = await new_model(service)
        for seq_id, kind in enumerate((WeightsKind.TRAINING, WeightsKind.SAMPLER), 1):
            path = await save(service, model_id, seq_id, kind, "short")
            await service.set_ttl("ada", path, 50.0)
        long = await save(service, model_id, 3, WeightsKind.EXTERNAL, "long")
        clock.ahead = 60.0
        assert [each.path for each in await service.checkpoints("ada")] == [long]
        await service.housekeeping.tidy()
        await settled(hub_of_each, "weights", 1)
        await settled(hub_of_each, "versions", 0)
        assert set(await service.weights_files("ada", long)) == {"adapter.npy"}


async def test_a_clock_that_jumps_deletes_nothing_for_an_hour(tenant_hub: TenantHub, clock: Clock) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        path = await save(service, model_id, 1, WeightsKind.TRAINING, "short")
        await service.set_ttl("ada", path, 1e6)
        await service.housekeeping.tidy()
        clock.jump = 2e6
        await service.housekeeping.tidy()
        assert len(directories(tenant_hub, "weights")) == 1
        clock.jump = 0.0
        await service.housekeeping.tidy()
        assert [each.path for each in await service.checkpoints("ada")] == [path]
        clock.jump = 2e6
        await service.housekeeping.tidy()
        clock.ahead = DOUBT_S + 1
        await service.heartbeat("ada", model_id.partition(":")[0])
        await service.housekeeping.tidy()
        await settled(tenant_hub, "weights", 0)


async def test_unnamed_versions_leave_when_a_tenants_disk_space_is_full(tmp_path: Path) -> None:
    hub = TenantHub(tmp_path, limits=TenantLimits(max_checkpoint_bytes=1))
    async with hub.serving() as service:
        model_id = await new_model(service)
        samplers = [
            await save(service, model_id, seq_id, WeightsKind.SAMPLER, None) for seq_id in range(1, NEWEST_KEPT + 3)
        ]
        await service.sample("ada", samplers[0], seq_id=0, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=2))
        # A file that is deleted while the sizes are read.
        (hub.root / "tenants" / "versions" / directories(hub, "versions")[-1] / "gone").symlink_to("nowhere")
        await service.housekeeping.tidy()
        await settled(hub, "versions", NEWEST_KEPT)
        for sampler_id in samplers[1:3]:
            with pytest.raises(Refusal):
                await service.sampler("ada", sampler_id)
        await service.sampler("ada", samplers[0])


@pytest.mark.parametrize("kind", [WeightsKind.TRAINING, WeightsKind.EXTERNAL])
async def test_overwritten_weights_leave_the_disk(tenant_hub: TenantHub, kind: WeightsKind) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        for seq_id in (1, 2, 3):
            saved = await service.save_weights("ada", model_id, seq_id=seq_id, kind=kind, name="a", overwrite=True)
            assert isinstance(await ended(service, saved.request_id), WeightsSaved)
        await settled(tenant_hub, "weights", 1)
        assert len(await service.checkpoints("ada")) == 1


async def test_saves_that_were_queued_count_for_the_disk_space(tmp_path: Path) -> None:
    hub = TenantHub(tmp_path, limits=TenantLimits(max_checkpoint_bytes=1))
    async with hub.serving() as service:
        model_id = await new_model(service)
        asked = [
            await service.save_weights("ada", model_id, seq_id=seq_id, kind=WeightsKind.TRAINING, name=f"w{seq_id}")
            for seq_id in (3, 2, 1)  # 2 and 3 wait for 1.
        ]
        outcomes = [await ended(service, one.request_id) for one in reversed(asked)]
        assert isinstance(outcomes[0], WeightsSaved)
        for outcome in outcomes[1:]:
            assert isinstance(outcome, Failed) and "too much disk space" in outcome.error
        assert len(directories(hub, "weights")) == 1


async def test_a_sampler_keeps_the_version_of_deleted_weights(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        path = await save(service, model_id, 1, WeightsKind.SAMPLER, "a")
        session_id = await service.create_session("ada", about={})
        sampler_id = await service.create_sampler("ada", session_id, sampler_seq_id=0, path=path)
        await service.delete_weights("ada", path)
        wish = SamplingWish(max_tokens=2)
        accepted = await service.sample("ada", sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        await ended(service, accepted.request_id)
        await service.finish_session("ada", session_id)
        await settled(tenant_hub, "versions", 0)


async def test_a_sampler_made_while_its_session_ends_keeps_no_version(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        path = await save(service, model_id, 1, WeightsKind.SAMPLER, "a")
        session_id = await service.create_session("ada", about={})
        made, _ = await asyncio.gather(
            service.create_sampler("ada", session_id, sampler_seq_id=0, path=path),
            service.finish_session("ada", session_id),
            return_exceptions=True,
        )
        assert isinstance(made, Refusal) and made.kind is RefusalKind.GONE
        await service.delete_weights("ada", path)
        await settled(tenant_hub, "versions", 0)


async def test_unused_samplers_end_but_for_the_newest(hub_of_each: TenantHub, clock: Clock) -> None:
    async with hub_of_each.serving() as service:
        model_id = await new_model(service)
        samplers = [
            await save(service, model_id, seq_id, WeightsKind.SAMPLER, None) for seq_id in range(1, NEWEST_KEPT + 3)
        ]
        clock.ahead = TenantsConfig().session_expires_s + 1
        await service.heartbeat("ada", model_id.partition(":")[0])
        await service.housekeeping.tidy()
        await settled(hub_of_each, "versions", NEWEST_KEPT)
        for sampler_id in samplers[:2]:
            with pytest.raises(Refusal):
                await service.sampler("ada", sampler_id)
        for sampler_id in samplers[2:]:
            await service.sampler("ada", sampler_id)
        await refused_again(service, samplers[0])
    async with hub_of_each.serving() as service:
        await refused_again(service, samplers[0])


async def refused_again(service: TenantService, sampler_id: str) -> None:
    """Check that no new sampler can get the number of an ended sampler."""
    session_id, _, number = sampler_id.split(":")
    with pytest.raises(Refusal, match="used up"):
        await service.create_sampler("ada", session_id, sampler_seq_id=int(number), base_model="base")


async def test_inflight_samplers_follow_the_newest_version(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        versions = []
        for seq_id in (1, 2):
            accepted = await service.save_weights(
                "ada",
                model_id,
                seq_id=seq_id,
                kind=WeightsKind.SAMPLER,
                name=None,
                sampler_seq_id=seq_id,
                inflight=True,
            )
            await ended(service, accepted.request_id)
            first = model_id.replace("train:0", "sample:1")
            sample = await service.sample(
                "ada", first, seq_id=seq_id, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=2)
            )
            outcome = await ended(service, sample.request_id)
            versions.append(outcome.policy_version)  # type: ignore[union-attr]
        assert versions[1] == versions[0] + 1
        await settled(tenant_hub, "versions", 1)
    async with tenant_hub.serving() as service:
        await settled(tenant_hub, "versions", 1)
        await service.sample("ada", first, seq_id=9, prompt_ids=PROMPT, wish=SamplingWish(max_tokens=2))


async def test_files_of_an_uncommitted_save_are_deleted(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        path = await save(service, await new_model(service), 1, WeightsKind.TRAINING, "a")
    for name in ("versions/v1073741999", "weights/0123"):
        Path(tenant_hub.root / "tenants" / name).mkdir(parents=True)  # noqa: ASYNC240
    async with tenant_hub.serving() as service:
        assert directories(tenant_hub, "versions") == [] and len(directories(tenant_hub, "weights")) == 1
        assert (await service.weights("ada", path)).path == path
